//! What ThreadSanitizer must report and what it must not: a race, if one is asked for; and all means of synchronization
//! in std, with and without waiting.

use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, LazyLock, Mutex, Once, OnceLock, RwLock, mpsc};
use std::thread;

const THREADS: u64 = 4;
const ROUNDS: u64 = 300;

/// A number that all threads may access; the test is what orders their accesses.
struct Shared(*mut u64);

// SAFETY: whoever uses it orders its uses himself; where a race is asked for, nobody does, and that is to be found.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Self {
        Self(Box::into_raw(Box::new(0)))
    }

    fn add(&self, number: u64) {
        // SAFETY: it lives as long as the program; for the rest see above.
        unsafe { *self.0 += number };
    }

    fn get(&self) -> u64 {
        // SAFETY: as above.
        unsafe { *self.0 }
    }
}

fn main() {
    let race = std::env::args().nth(1).as_deref() == Some("race");
    one_after_the_other(race);
    locks();
    conditions();
    first_uses();
    channels();
}

/// Two threads that increment a number, the second after the first has set a flag: in time always in this order. With
/// `race` the flag is relaxed, so the accesses to the number are not ordered and are a data race.
fn one_after_the_other(race: bool) {
    let (release, acquire) = match race {
        true => (Ordering::Relaxed, Ordering::Relaxed),
        false => (Ordering::Release, Ordering::Acquire),
    };
    let (number, turn, both) = (Shared::new(), AtomicUsize::new(0), Barrier::new(2));
    thread::scope(|scope| {
        for i in 0..2 {
            let (number, turn, both) = (&number, &turn, &both);
            scope.spawn(move || {
                both.wait(); // else the first may have ended before the second begins
                while turn.load(acquire) < i {
                    hint::spin_loop();
                }
                number.add(1);
                turn.fetch_add(1, release);
            });
        }
    });
    assert_eq!(number.get(), 2);
}

/// Locks that are held so long that others wait for them.
fn locks() {
    let (number, lock) = (Shared::new(), Mutex::new(()));
    let (other, read_write) = (Shared::new(), RwLock::new(()));
    thread::scope(|scope| {
        for i in 0..THREADS {
            let (number, lock, other, read_write) = (&number, &lock, &other, &read_write);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let held = lock.lock().unwrap();
                    number.add(1);
                    thread::yield_now();
                    drop(held);
                    if round % THREADS == i {
                        let _held = read_write.write().unwrap();
                        other.add(1);
                        thread::yield_now();
                    } else {
                        let _held = read_write.read().unwrap();
                        assert!(other.get() <= ROUNDS);
                        thread::yield_now();
                    }
                }
            });
        }
    });
    assert_eq!((number.get(), other.get()), (THREADS * ROUNDS, ROUNDS));
}

/// Two threads that wait for each other in turn, and all at a barrier.
fn conditions() {
    let (number, turn, changed) = (Shared::new(), Mutex::new(0), Condvar::new());
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        for i in 0..2 {
            let (number, turn, changed, barrier) = (&number, &turn, &changed, &barrier);
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    drop(changed.wait_while(turn.lock().unwrap(), |turn| *turn % 2 != i).unwrap());
                    number.add(1);
                    *turn.lock().unwrap() += 1;
                    changed.notify_all();
                }
                for round in 0..ROUNDS {
                    barrier.wait();
                    if round % 2 == i {
                        number.add(1);
                    }
                }
            });
        }
    });
    assert_eq!(number.get(), 3 * ROUNDS);
}

/// A value that the first of several threads creates for all.
fn first_uses() {
    for _ in 0..ROUNDS / 10 {
        let (number, once, cell) = (Shared::new(), Once::new(), OnceLock::new());
        let lazy = LazyLock::new(|| Box::new(1));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    once.call_once(|| number.add(1));
                    let boxed: &Box<u64> = cell.get_or_init(|| Box::new(2));
                    assert_eq!(number.get() + **boxed + **lazy, 4);
                });
            }
        });
    }
}

/// Boxes that go from thread to thread, and values that die with the last of their owners.
fn channels() {
    let (sender, receiver) = mpsc::sync_channel(2);
    let owned = Arc::new(Mutex::new(Vec::new()));
    for i in 0..THREADS {
        let (sender, owned) = (sender.clone(), owned.clone());
        thread::spawn(move || {
            for n in 0..ROUNDS {
                sender.send(Box::new(n)).unwrap();
                owned.lock().unwrap().push(Box::new(i));
            }
        });
    }
    drop((sender, owned));
    let sum: u64 = receiver.into_iter().map(|number| *number).sum();
    assert_eq!(sum, THREADS * ROUNDS * (ROUNDS - 1) / 2);
}
