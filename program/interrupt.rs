//! Ctrl-C, and the request to end that systems send: the first one ends the run, the second one the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// The status of a process that was interrupted.
pub const STATUS: u8 = 130;

/// Whether the run is to end.
pub struct Interrupt {
    came: Arc<AtomicBool>,
}

impl Interrupt {
    /// Until [`Self::begin`] nothing is worth a clean end, and a signal ends the process.
    pub fn new() -> Result<Self> {
        let came = Arc::new(AtomicBool::new(true));
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, STATUS.into(), came.clone())?;
            flag::register(signal, came.clone())?;
        }
        Ok(Self { came })
    }

    /// From here on the first signal is only noted.
    pub fn begin(&self) {
        self.came.store(false, Ordering::SeqCst);
    }

    /// Whether a signal has come.
    pub fn came(&self) -> bool {
        self.came.load(Ordering::SeqCst)
    }
}
