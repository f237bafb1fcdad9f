//! One queue of requests over the processes that mpirun or srun has started.
//!
//! Each process (*rank*) has the model, all requests and devices of its own. Rank 0 keeps the queue (`hub`); the
//! others ask it for requests by number and bring the answers (`stock`, `message`). A rank sends a report and waits
//! for the reply before it sends the next one, so no more than one message of a rank is under way, rank 0 needs no
//! memory for messages that pile up, and blocking sends cannot wait for each other. A rank that has nothing to do gets
//! its reply when there is something: requests that another rank has given back, or the end.
//!
//! Nothing here knows MPI but `mpi.rs`: the others see a `transport::Transport`, of which tests have their own. Without
//! the feature `mpi` there is only [`launcher`], which also says who reads stdout.

#[cfg(any(test, feature = "mpi"))]
pub mod hub;
pub mod launcher;
#[cfg(any(test, feature = "mpi"))]
pub mod message;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(any(test, feature = "mpi"))]
pub mod node;
#[cfg(test)]
mod simulation;
#[cfg(any(test, feature = "mpi"))]
pub mod stock;
#[cfg(any(test, feature = "mpi"))]
pub mod transport;
