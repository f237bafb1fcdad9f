//! The calls that NVIDIA's libcuda and AMD's libamdhip64 have in common: they differ in their names and types alone.
//!
//! Libraries are loaded at run time, so that getp runs with and without them.

use crate::error::{Error, GpuFault, Result};
use libloading::os::unix::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// What a call returns; 0 is success. A plain number, whatever a header says: as a Rust enum a code of a newer library
/// would be undefined behaviour.
pub type Code = c_int;

/// `cudaErrorNotReady` and `hipErrorNotReady`.
pub const NOT_READY: Code = 600;
/// What enabling access to a peer's memory returns where it has been enabled before.
pub const PEER_ALREADY_ENABLED: Code = 704;
pub const STREAM_NON_BLOCKING: c_uint = 1;
pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const HOST_PORTABLE: c_uint = 1;
pub const HOST_MAPPED: c_uint = 2;

/// A runtime's types: opaque pointers or numbers of 64 bits.
pub trait Types {
    type Address: Raw;
    type Stream: Raw;
    type Event: Raw;
    type Module: Raw;
    type Function: Raw;
    type Graph: Raw;
    type GraphExec: Raw;
    type GraphNode: Raw;
    type CaptureMode: Copy;
    /// Other threads' allocations do not invalidate a capture.
    const CAPTURE_THREAD_LOCAL: Self::CaptureMode;
}

/// A type that is a handle or an address, which the rest of the library has as a number.
pub trait Raw: Copy {
    fn of(number: u64) -> Self;
    fn raw(self) -> u64;
}

impl Raw for u64 {
    fn of(number: u64) -> Self {
        number
    }

    fn raw(self) -> u64 {
        self
    }
}

impl<T> Raw for *mut T {
    fn of(number: u64) -> Self {
        number as Self
    }

    fn raw(self) -> u64 {
        self as u64
    }
}

/// An entry point.
pub struct Call<F> {
    /// For errors: its name without a version.
    pub name: &'static str,
    pub function: F,
}

/// A function of the runtime's library.
///
/// # Safety
///
/// `F` is the symbol's type.
pub unsafe fn symbol<F: Copy>(runtime: &str, library: &Library, name: &str) -> Result<F> {
    // SAFETY: the caller guarantees the type.
    let found = unsafe { library.get::<F>(name) };
    found
        .map(|found| *found)
        .map_err(|_| no_driver(runtime, format!("dlsym({name})")))
}

/// The runtime is not there, or not whole.
pub fn no_driver(runtime: &str, call: String) -> Error {
    Error::Gpu {
        device: runtime.into(),
        call,
        fault: GpuFault::NoDriver,
        code: None,
    }
}

macro_rules! calls {
    ($($name:ident ($($arg:ty),*);)*) => {
        /// The calls of a runtime of these types, which return `C`.
        pub struct Calls<T: Types, C = Code> {
            $(pub $name: Call<unsafe extern "C" fn($($arg),*) -> C>,)*
        }

        /// Their symbols.
        pub struct Symbols {
            $(pub $name: &'static str,)*
        }

        impl<T: Types> Calls<T> {
            /// Those of a library.
            ///
            /// # Safety
            ///
            /// `T`'s types are the library's.
            pub unsafe fn load(runtime: &str, library: &Library, symbols: &Symbols) -> Result<Self> {
                Ok(Self {
                    $($name: Call {
                        name: symbols.$name.trim_end_matches("_v2"),
                        // SAFETY: the caller guarantees the types.
                        function: unsafe { symbol(runtime, library, symbols.$name) }?,
                    },)*
                })
            }
        }
    };
}

calls! {
    device_count(*mut c_int);
    memory_info(*mut usize, *mut usize);
    alloc(*mut T::Address, usize);
    free(T::Address);
    alloc_host(*mut *mut c_void, usize, c_uint);
    free_host(*mut c_void);
    host_address(*mut T::Address, *mut c_void, c_uint);
    copy_to_device(T::Address, *mut c_void, usize, T::Stream);
    copy_to_host(*mut c_void, T::Address, usize, T::Stream);
    copy(T::Address, T::Address, usize, T::Stream);
    fill(T::Address, u8, usize, T::Stream);
    create_stream(*mut T::Stream, c_uint);
    destroy_stream(T::Stream);
    synchronize_stream(T::Stream);
    query_stream(T::Stream);
    wait_event(T::Stream, T::Event, c_uint);
    create_event(*mut T::Event, c_uint);
    destroy_event(T::Event);
    record_event(T::Event, T::Stream);
    synchronize_event(T::Event);
    elapsed_ms(*mut f32, T::Event, T::Event);
    load_module(*mut T::Module, *const c_void);
    unload_module(T::Module);
    function(*mut T::Function, T::Module, *const c_char);
    begin_capture(T::Stream, T::CaptureMode);
    end_capture(T::Stream, *mut T::Graph);
    graph_nodes(T::Graph, *mut T::GraphNode, *mut usize);
    destroy_graph(T::Graph);
    launch_graph(T::GraphExec, T::Stream);
    destroy_graph_exec(T::GraphExec);
}
