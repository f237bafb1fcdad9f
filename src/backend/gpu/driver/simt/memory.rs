//! Device memory from the host's allocator: limited by a capacity, poisoned, with guard bytes on both sides.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

const ALIGN_BYTES: usize = 256;
const GUARD: u8 = 0xa5;
const GUARD_BYTES: usize = 256;
/// What new memory holds: NaN in every format.
const POISON: u8 = 0xff;

/// The kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Device memory, of undefined content.
    Device,
    /// Pinned host memory, zeroed; it does not count against the capacity.
    Pinned,
}

struct Allocation {
    kind: MemoryKind,
    bytes: usize,
}

impl Allocation {
    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.checked_add(2 * GUARD_BYTES)?, ALIGN_BYTES).ok()
    }

    /// Whether the guard bytes are intact.
    fn is_whole(&self, at: u64) -> bool {
        // SAFETY: both guards belong to the allocation, which is live as long as it is in the heap's list.
        let guards = unsafe {
            [
                std::slice::from_raw_parts((at as usize - GUARD_BYTES) as *const u8, GUARD_BYTES),
                std::slice::from_raw_parts((at as usize + self.bytes) as *const u8, GUARD_BYTES),
            ]
        };
        guards.iter().all(|guard| **guard == [GUARD; GUARD_BYTES])
    }
}

/// The memory of one device.
pub struct Heap {
    capacity_bytes: u64,
    used_bytes: u64,
    allocations: BTreeMap<u64, Allocation>,
}

impl Heap {
    /// An empty one.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            used_bytes: 0,
            allocations: BTreeMap::new(),
        }
    }

    /// The capacity in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.capacity_bytes - self.used_bytes
    }

    /// Counts memory that something else than an allocation holds; `false` if there is too little.
    pub fn take(&mut self, bytes: u64) -> bool {
        let enough = bytes <= self.free_bytes();
        if enough {
            self.used_bytes += bytes;
        }
        enough
    }

    /// Gives back what was taken.
    pub fn give_back(&mut self, bytes: u64) {
        self.used_bytes -= bytes;
    }

    /// The number of live allocations of a kind, and their bytes.
    pub fn live(&self, kind: MemoryKind) -> (usize, usize) {
        let of_kind = self.allocations.values().filter(|allocation| allocation.kind == kind);
        of_kind.fold((0, 0), |(count, bytes), a| (count + 1, bytes + a.bytes))
    }

    /// Allocates `bytes` bytes; `None` if the capacity is exceeded.
    pub fn alloc(&mut self, kind: MemoryKind, bytes: usize) -> Option<u64> {
        let counted = counted_bytes(kind, bytes);
        if counted > self.free_bytes() {
            return None;
        }
        let layout = Allocation::layout(bytes)?;
        // SAFETY: the layout is not empty: `bytes` is checked by the caller.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            return None;
        }
        let fill = if kind == MemoryKind::Pinned { 0 } else { POISON };
        // SAFETY: guards and content lie within the layout just allocated.
        unsafe {
            base.write_bytes(GUARD, layout.size());
            base.add(GUARD_BYTES).write_bytes(fill, bytes);
        }
        let at = base as u64 + GUARD_BYTES as u64;
        self.used_bytes += counted;
        self.allocations.insert(at, Allocation { kind, bytes });
        Some(at)
    }

    /// Frees an allocation; an error says what is wrong with it.
    pub fn free(&mut self, kind: MemoryKind, at: u64) -> Result<(), String> {
        if self
            .allocations
            .get(&at)
            .is_none_or(|allocation| allocation.kind != kind)
        {
            return Err(format!("{at:#x} is no allocation; given back twice?"));
        }
        let allocation = self.allocations.remove(&at).expect("just found");
        let whole = allocation.is_whole(at);
        self.used_bytes -= counted_bytes(kind, allocation.bytes);
        let layout = Allocation::layout(allocation.bytes).expect("it was allocated with it");
        let base = (at as usize - GUARD_BYTES) as *mut u8;
        // SAFETY: allocated by `alloc` with this layout, and no longer in the list. Poisoned for those who still read
        // it.
        unsafe {
            base.write_bytes(POISON, layout.size());
            dealloc(base, layout);
        }
        if whole {
            Ok(())
        } else {
            Err(overwritten(at, allocation.bytes))
        }
    }

    /// Whether these bytes lie within one allocation.
    pub fn holds(&self, at: u64, bytes: usize) -> bool {
        let below = self.allocations.range(..=at).next_back();
        below.is_some_and(|(start, allocation)| {
            let offset = at - start;
            offset <= allocation.bytes as u64 && bytes as u64 <= allocation.bytes as u64 - offset
        })
    }

    /// An error if the guard bytes of an allocation were overwritten.
    pub fn check(&self) -> Result<(), String> {
        match self
            .allocations
            .iter()
            .find(|(at, allocation)| !allocation.is_whole(**at))
        {
            Some((&at, allocation)) => Err(overwritten(at, allocation.bytes)),
            None => Ok(()),
        }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        while let Some((&at, allocation)) = self.allocations.first_key_value() {
            let kind = allocation.kind;
            let _ = self.free(kind, at);
        }
    }
}

fn counted_bytes(kind: MemoryKind, bytes: usize) -> u64 {
    match kind {
        MemoryKind::Device => (bytes as u64)
            .checked_next_multiple_of(ALIGN_BYTES as u64)
            .unwrap_or(u64::MAX),
        MemoryKind::Pinned => 0,
    }
}

fn overwritten(at: u64, bytes: usize) -> String {
    format!("bytes beside the allocation of {bytes} bytes at {at:#x} were overwritten")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_poisoned_and_given_back() {
        let mut heap = Heap::new(1024);
        let at = heap.alloc(MemoryKind::Device, 300).unwrap();
        assert_eq!(at % ALIGN_BYTES as u64, 0);
        assert_eq!(heap.free_bytes(), 512);
        assert_eq!(heap.live(MemoryKind::Device), (1, 300));
        // SAFETY: just allocated.
        let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, 300) };
        assert!(bytes.iter().all(|&b| b == POISON));
        assert!(heap.alloc(MemoryKind::Device, 513).is_none());
        assert!(heap.alloc(MemoryKind::Device, usize::MAX).is_none());
        let pinned = heap.alloc(MemoryKind::Pinned, 4096).unwrap();
        // SAFETY: just allocated.
        assert_eq!(unsafe { *(pinned as *const u8) }, 0);
        assert!(heap.free(MemoryKind::Device, pinned).is_err());
        heap.free(MemoryKind::Pinned, pinned).unwrap();
        heap.free(MemoryKind::Device, at).unwrap();
        assert_eq!(heap.free_bytes(), 1024);
        assert!(heap.free(MemoryKind::Device, at).unwrap_err().contains("twice"));
    }

    #[test]
    fn ranges_within_an_allocation_are_known() {
        let mut heap = Heap::new(1024);
        let at = heap.alloc(MemoryKind::Device, 100).unwrap();
        for (offset, bytes, held) in [
            (0, 100, true),
            (100, 0, true),
            (1, 100, false),
            (101, 0, false),
            (99, 1, true),
        ] {
            assert_eq!(heap.holds(at + offset, bytes), held, "{offset} {bytes}");
        }
        assert!(!heap.holds(at - 1, 1));
    }

    #[test]
    fn writes_beside_an_allocation_are_found() {
        let mut heap = Heap::new(1024);
        for offset in [-1, 10] {
            let at = heap.alloc(MemoryKind::Device, 10).unwrap();
            heap.check().unwrap();
            // SAFETY: the guard is part of the allocation.
            unsafe { *((at as i64 + offset) as *mut u8) = 1 };
            assert!(heap.check().unwrap_err().contains("10 bytes"));
            assert!(heap.free(MemoryKind::Device, at).is_err());
        }
    }
}
