//! Several devices as one replica: a pipeline of stages, each of which has a contiguous range of the model's layers.
//!
//! [`form`] says which devices go together, [`cut`] which layers each has, both from what [`demand`] counts; [`hop`]
//! brings rows from a stage to the next. From the same counts [`steps`] has a device alone take longer steps, and
//! [`fit`] tells documents what fits. What runs them is [`super::replica`], for one device as for several.
//!
//! All stages read one plan in pinned memory, and a KV block has the same number in all of them, so the stage with the
//! least room decides how many there are. The slots' last tokens lie in pinned memory, too: the last stage's kernels
//! write them and the first one's embedding reads them, 4 bytes a row over the bus. An event orders that, and the host
//! has no part in it.
//!
//! A stage without the embedding launches its first kernel behind the end of the plan's fetch: on NVIDIA kernels read
//! the plan before their predecessor has ended, and elsewhere the embedding, which does not, is between them.
//!
//! What a device does behind a lost one's event may never be done. So the host waits in the order of steps and stages,
//! which finds the lost device first, and a replica that is dropped gives its devices ten seconds to end, or leaves
//! them their memory.

pub mod cut;
pub mod demand;
pub mod fit;
pub mod form;
pub mod hop;
pub mod steps;
