//! Threads that are gone when their owner is.

use crate::error::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::thread::{Builder, JoinHandle};

/// A pool of threads and their handles: rayon's own pool does not wait for its threads, which would then run on in a
/// program that believes everything given back and may unload the library.
pub struct Workers {
    // Dropped in this order: the pool tells its threads to end, then they are waited for.
    pool: ThreadPool,
    _threads: Threads,
}

struct Threads(Vec<JoinHandle<()>>);

impl Workers {
    /// So many threads, or one a core if `threads` is 0, named `name` and a number.
    pub fn start(name: &str, threads: usize) -> Result<Self> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let mut handles = Threads(Vec::with_capacity(threads));
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .spawn_handler(|worker| {
                let thread = Builder::new().name(format!("{name} {}", worker.index()));
                handles.0.push(thread.spawn(|| worker.run())?);
                Ok(())
            })
            .build()
            .map_err(|e| Error::State(format!("cannot start {threads} threads: {e}; lower GETP_THREADS")))?;
        Ok(Self {
            pool,
            _threads: handles,
        })
    }

    /// The pool.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            // It fails if the thread panicked, which rayon does not let it.
            let _ = thread.join();
        }
    }
}
