//! One queue of requests over the processes that mpirun or srun has started.
//!
//! Each process (*rank*) has the model, all requests and devices of its own. Rank 0 keeps the queue (`hub`); the
//! others ask it for requests by number and bring the answers (`stock`, `message`). A rank sends a report and waits
//! for the reply before it sends the next one, so no more than one message of a rank is under way, rank 0 needs no
//! memory for messages that pile up, and blocking sends cannot wait for each other. A rank that has nothing to do gets
//! its reply when there is something: requests that another rank has given back, or the end.
//!
//! Before a request is started, all ranks compare fingerprints of requests, model, weights, tokenizer, sampler and
//! options, and exchange their replicas' limits. So all refuse the same requests, and rank 0 gives a rank what it has
//! room for. A rank that has lost the device with that room hands a request back, and rank 0 gives it to another. If no
//! rank that works can run it, it gets no answer: no rank opens a CPU replica beside its devices. If no rank has a
//! device, each opens one.
//!
//! At the end rank 0's rows go to all ranks along a tree: each returns them whole, since each may write the same file.
//!
//! A rank that fails within the run (no memory for a message, say) reports that. Rank 0 replies to every report with
//! the end; then it sends the reason in place of the rows, and all ranks return -1. Each rank has a reply to come or
//! will report, so nobody is told while he waits for something else, and no message is left over. The room for the
//! largest message is there before a request is taken. A rank that fails where the others cannot be told ends the job
//! at exit.
//!
//! Nothing here knows MPI but `mpi.rs`, which only the feature `mpi` compiles: the others see a
//! [`transport::Transport`], of which tests have their own. The [`launcher`] also says who reads stdout.

pub mod hub;
pub mod launcher;
pub mod message;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod node;
#[cfg(test)]
mod simulation;
pub mod stock;
pub mod transport;
