//! Graphs of what a device's context launches.
//!
//! A capture has a stream of its own. Another thread's call may invalidate it: HIP's calls that wait for the whole
//! device do, whichever device the capture is on, and so does what other threads do on CUDA's legacy stream. HIP's
//! stream then refuses all further work, captured or not; the context's own has to remain usable.

use super::Context;
use crate::backend::gpu::driver::StreamHandle;
use crate::backend::gpu::memory::{Graph, Stream};
use crate::error::{Error, GpuFault, Result};
use std::sync::{MutexGuard, PoisonError};

/// How often a capture is begun before its work is launched without a graph.
const TRIES: usize = 3;

/// What came of a capture.
pub enum Capture {
    /// A graph of all kernels launched.
    Graph(Graph),
    /// Each try was invalidated by another thread's calls; a later one may succeed.
    Invalidated,
    /// The runtime has left kernels out.
    Incomplete {
        /// Nodes of the graph.
        nodes: usize,
        /// Kernels launched.
        launches: usize,
    },
}

/// The capture under way in a context.
#[derive(Default)]
pub struct Capturing {
    /// Where kernels go meanwhile. Kept for the next capture, unless one was invalidated on it.
    stream: Option<Stream>,
    /// Kernels launched since its beginning; `None` while there is no capture.
    launches: Option<usize>,
}

impl Context {
    /// Makes a graph of the kernels that `work` launches; none of them runs. `work` may be called several times.
    pub fn capture(&self, mut work: impl FnMut() -> Result<()>) -> Result<Capture> {
        for _ in 0..TRIES {
            match self.capture_once(&mut work) {
                Err(Error::Gpu {
                    fault: GpuFault::Capture,
                    ..
                }) => self.capturing().stream = None,
                captured => return captured,
            }
        }
        Ok(Capture::Invalidated)
    }

    fn capture_once(&self, work: &mut impl FnMut() -> Result<()>) -> Result<Capture> {
        let stream = self.begin_capture()?;
        let queued = work();
        let launches = self.capturing().launches.take().unwrap_or_default();
        // Capturing is ended also if `work` failed, or the stream would stay unusable; the graph then has an owner.
        let captured = self.driver.end_capture(stream);
        let captured = captured.map(|captured| (Graph::new(&self.driver, captured.graph), captured.nodes));
        queued?;
        let (graph, nodes) = captured?;
        // What uploads the graph is done before another stream launches it.
        self.driver.synchronize(stream)?;
        if nodes == launches {
            Ok(Capture::Graph(graph))
        } else {
            Ok(Capture::Incomplete { nodes, launches })
        }
    }

    /// Begins a capture; gives its stream.
    fn begin_capture(&self) -> Result<StreamHandle> {
        let mut capturing = self.capturing();
        let stream = match capturing.stream.take() {
            Some(stream) => stream,
            None => Stream::new(&self.driver)?,
        };
        let handle = stream.handle;
        capturing.stream = Some(stream);
        self.driver.begin_capture(handle)?;
        capturing.launches = Some(0);
        Ok(handle)
    }

    /// Where a kernel goes that is launched now.
    pub(super) fn launch_stream(&self) -> StreamHandle {
        let mut capturing = self.capturing();
        match &mut *capturing {
            Capturing {
                stream: Some(stream),
                launches: Some(launches),
            } => {
                *launches += 1;
                stream.handle
            }
            _ => self.stream.handle,
        }
    }

    fn capturing(&self) -> MutexGuard<'_, Capturing> {
        self.capturing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
