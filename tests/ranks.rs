//! One queue over several ranks, which here are threads: answers are the same for any number of ranks, and whichever
//! rank fails at whatever. All ranks end with the same rows, or all are told why not.

mod fake;

use fake::{Control, PROMPTS, Program, expected, finish, inference, warm_up};
use getp::abi::driver::BACKENDS;
use getp::abi::lifecycle;
use getp::abi::types::Sampler;
use getp::cluster::message::Reply;
use getp::cluster::transport::{Transport, gather};
use getp::error::{Error, Result};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::Duration;

const STEPS: usize = 32;

/// By rank: messages that have arrived, and who has sent them.
type Boxes = Vec<Mutex<VecDeque<(usize, Vec<u32>)>>>;

/// The ways of some threads to each other.
struct Ways {
    boxes: Boxes,
    /// Whether a rank has abandoned the others. MPI ends them then; here their calls fail.
    abandoned: AtomicBool,
}

/// What fails.
#[derive(Clone, Copy)]
enum Fails {
    Never,
    /// This message, counted from 1 over those sent and received, once.
    At(usize),
    /// What rank 0 sends after the run's last reply: the rows.
    Rows,
    /// The run's last reply to this rank where no request has an answer, once.
    EndTo(usize),
}

/// The way of one thread to the others.
struct Double {
    rank: usize,
    ways: Arc<Ways>,
    fails: Fails,
    messages: AtomicUsize,
    /// Whether it has sent the run's last reply.
    has_ended: AtomicBool,
}

impl Double {
    /// To be called before each message, `to` a rank.
    fn pass(&self, to: usize, words: &[u32]) -> Result<()> {
        let is_end = |reply: Reply| reply.end && reply.unfinished == prompts().len();
        let message = self.messages.fetch_add(1, SeqCst) + 1;
        let fails = match self.fails {
            Fails::Never => false,
            Fails::At(at) => message == at,
            Fails::Rows => self.has_ended.load(SeqCst),
            Fails::EndTo(rank) => {
                to == rank && Reply::from_words(words).is_ok_and(is_end) && !self.has_ended.swap(true, SeqCst)
            }
        };
        if fails {
            return Err(Error::State("the way fails".into()));
        }
        Ok(())
    }
}

impl Transport for Double {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ways.boxes.len()
    }

    fn send(&self, to: usize, words: &[u32]) -> Result<()> {
        self.pass(to, words)?;
        // What ranks agree on without words reads as a reply, too, but of no devices.
        if Reply::from_words(words).is_ok_and(|reply| reply.end && reply.devices > 0) {
            self.has_ended.store(true, SeqCst);
        }
        self.ways.boxes[to]
            .lock()
            .unwrap()
            .push_back((self.rank, words.to_vec()));
        Ok(())
    }

    fn receive(&self, from: Option<usize>, words: &mut Vec<u32>) -> Result<Option<usize>> {
        if self.ways.abandoned.load(SeqCst) {
            return Err(Error::State("a rank is gone".into()));
        }
        let mut arrived = self.ways.boxes[self.rank].lock().unwrap();
        let is_from = |arrived: &(usize, Vec<u32>)| from.is_none_or(|from| arrived.0 == from);
        let Some(at) = arrived.iter().position(is_from) else {
            return Ok(None);
        };
        self.pass(self.rank, &arrived[at].1)?;
        let (from, received) = arrived.remove(at).unwrap();
        *words = received;
        Ok(Some(from))
    }

    fn abandon(&self) {
        self.ways.abandoned.store(true, SeqCst);
    }
}

fn doubles(ranks: usize) -> Vec<Double> {
    let ways = Arc::new(Ways {
        boxes: (0..ranks).map(|_| Mutex::default()).collect(),
        abandoned: AtomicBool::new(false),
    });
    let double = |rank| Double {
        rank,
        ways: ways.clone(),
        fails: Fails::Never,
        messages: AtomicUsize::new(0),
        has_ended: AtomicBool::new(false),
    };
    (0..ranks).map(double).collect()
}

/// Calls `work` for each rank at the same time; fails if a rank does not come to an end.
fn on_all<T: Send + 'static>(ranks: Vec<T>, work: impl Fn(usize, T) + Send + Sync + 'static) {
    let (count, work) = (ranks.len(), Arc::new(work));
    let (done, all_done) = mpsc::channel();
    for (rank, of_rank) in ranks.into_iter().enumerate() {
        let (work, done) = (work.clone(), done.clone());
        thread::spawn(move || {
            let result = catch_unwind(AssertUnwindSafe(|| work(rank, of_rank)));
            done.send((rank, result.is_ok())).unwrap();
        });
    }
    for _ in 0..count {
        let (rank, is_ok) = all_done.recv_timeout(Duration::from_secs(60)).expect("a rank hangs");
        assert!(is_ok, "rank {rank} fails");
    }
}

/// Ranks with replicas as told, each with the way to the others for so many engines.
fn ranks(mut controls: Vec<Control>, engines: usize) -> Vec<Arc<Control>> {
    for _ in 0..engines {
        connect(&mut controls, |_| Fails::Never);
    }
    controls.into_iter().map(Arc::new).collect()
}

/// The same for one engine, with what fails of each rank's way.
fn ranks_failing(mut controls: Vec<Control>, fails: impl Fn(usize) -> Fails) -> Vec<Arc<Control>> {
    connect(&mut controls, fails);
    controls.into_iter().map(Arc::new).collect()
}

fn connect(controls: &mut [Control], fails: impl Fn(usize) -> Fails) {
    let doubles = doubles(controls.len());
    for (control, mut double) in controls.iter_mut().zip(doubles) {
        double.fails = fails(double.rank);
        control.transports.get_mut().unwrap().push(Box::new(double));
    }
}

/// More prompts than all replicas have slots for.
fn prompts() -> Vec<&'static str> {
    PROMPTS.iter().copied().cycle().take(40).collect()
}

fn program(temperature: f32) -> Program {
    let mut program = Program::new(&prompts(), STEPS);
    program.sampler.temperature = temperature;
    program
}

/// Checks the rows, their number of tokens and the sampler's state.
fn check(program: &Program, before: &Sampler, tokens: i64) {
    let answers = prompts().into_iter().enumerate();
    let answers: Vec<_> = answers.map(|(i, prompt)| expected(prompt, STEPS, before, i)).collect();
    let rows: Vec<Vec<c_int>> = answers.iter().map(|(row, _)| row.clone()).collect();
    assert_eq!(program.rows(), rows);
    assert_eq!(tokens as usize, rows.iter().map(Vec::len).sum::<usize>());
    assert_eq!(program.sampler.rng_state, answers[0].1);
}

/// Answers all prompts, and checks the answers.
fn answer_all(program: &mut Program, control: &Arc<Control>) {
    let before = program.sampler;
    let tokens = inference(program, control).unwrap();
    check(program, &before, tokens);
}

/// All ranks answer all prompts, twice.
fn check_all(controls: Vec<Control>, temperature: f32) {
    on_all(ranks(controls, 1), move |_, control| {
        let mut program = program(temperature);
        for _ in 0..2 {
            answer_all(&mut program, &control);
        }
        finish(&mut program).unwrap();
        assert_eq!(control.opened.load(SeqCst), control.dropped.load(SeqCst));
    });
}

fn replicas(replicas: usize) -> Control {
    Control {
        replicas,
        depth: 2,
        ..Control::default()
    }
}

fn failing_at_once() -> Control {
    failing(&[(0, 1), (1, 1)])
}

fn failing(calls: &[(usize, usize)]) -> Control {
    Control {
        fail_calls: calls.to_vec(),
        ..replicas(2)
    }
}

#[test]
fn every_rank_gets_what_each_has_brought() {
    for n in [1, 2, 3, 4, 9] {
        on_all(doubles(n), move |rank, double| {
            // Twice: a rank that is ahead must not be taken for one that is behind.
            for _ in 0..2 {
                let all: Vec<Vec<u32>> = (0..n).map(|rank| vec![rank as u32; rank]).collect();
                assert_eq!(gather(&double, all[rank].clone()).unwrap(), all);
            }
        });
    }
}

#[test]
fn answers_do_not_depend_on_ranks() {
    for numbers in [&[1][..], &[1, 1], &[2, 1, 3], &[1; 8]] {
        for temperature in [0.0, 1.0] {
            check_all(numbers.iter().map(|&n| replicas(n)).collect(), temperature);
        }
    }
}

#[test]
fn lost_devices_are_made_up_for_by_other_ranks() {
    for call in [1, 2, 7, 30] {
        // One of two; both, on rank 0 and on another.
        check_all(vec![failing(&[(0, call)]), replicas(1)], 1.0);
        check_all(vec![failing(&[(0, call), (1, call + 1)]), replicas(1)], 1.0);
        check_all(vec![replicas(1), failing(&[(0, call), (1, call)]), replicas(1)], 1.0);
    }
}

#[test]
fn without_devices_all_ranks_take_the_replica_that_stands_in() {
    let lost = || failing(&[(0, 3), (1, 9)]);
    check_all(vec![lost(), lost()], 1.0);
    let refused = Control {
        refuse_fallback: 1.into(),
        ..lost()
    };
    check_all(vec![refused, lost()], 1.0);
}

#[test]
fn without_any_replica_left_all_ranks_say_how_many_requests_have_no_answer() {
    let lost = || Control {
        refuse_fallback: 1.into(),
        ..failing_at_once()
    };
    on_all(ranks(vec![lost(), lost()], 1), |_, control| {
        let mut program = program(0.0);
        let why = inference(&mut program, &control).unwrap_err().to_string();
        assert!(why.contains("40 requests have no answer"), "{why}");
        assert!(program.rows().iter().all(Vec::is_empty));
        finish(&mut program).unwrap();
    });
}

#[test]
fn a_rank_that_opens_nothing_receives_the_answers() {
    for refusing in 0..3 {
        let control = |rank| Control {
            refuse: rank == refusing,
            ..replicas(1)
        };
        on_all(ranks((0..3).map(control).collect(), 1), |_, control| {
            let mut program = program(1.0);
            let (bytes, before) = (program.bytes(), program.sampler);
            warm_up(&mut program, &control).unwrap();
            assert_ne!(program.bytes(), bytes);
            let tokens = inference(&mut program, &control).unwrap();
            check(&program, &before, tokens);
            finish(&mut program).unwrap();
            assert_eq!(program.bytes(), bytes);
        });
    }
}

#[test]
fn if_no_rank_opens_anything_all_are_told() {
    let refusing = || Control {
        refuse: true,
        ..Control::default()
    };
    on_all(ranks(vec![refusing(), refusing()], 1), |_, control| {
        let why = warm_up(&mut program(0.0), &control).unwrap_err().to_string();
        assert!(why.contains("the fake refuses"), "{why}");
    });
}

/// What rank 1 alone does to its program, and what all ranks are told.
type Odd = (fn(&mut Program), &'static str);

#[test]
fn ranks_with_something_else_are_told_and_go_on() {
    let odds: [Odd; 6] = [
        (
            |program| program.requests.num_reqs -= 1,
            "another set of requests than rank 0",
        ),
        (
            |program| program.requests.max_token_len = 0,
            "rank 1 cannot begin: Requests",
        ),
        (|program| program.sampler.topp = 0.5, "another sampler than rank 0"),
        (|program| program.sampler.rng_state += 1, "another sampler than rank 0"),
        (
            |program| program.sampler.vocab_size += 1,
            "rank 1 cannot begin: Sampler",
        ),
        (|program| program.tokenizer.vocab_size = -1, "rank 1 cannot begin: "),
    ];
    on_all(
        ranks(vec![replicas(1), replicas(2), replicas(1)], 1),
        move |rank, control| {
            let mut program = program(1.0);
            warm_up(&mut program, &control).unwrap();
            for (change, told) in odds {
                let (sampler, requests, vocab_size) = (program.sampler, program.requests, program.tokenizer.vocab_size);
                if rank == 1 {
                    change(&mut program);
                }
                let why = inference(&mut program, &control).unwrap_err().to_string();
                if rank != 1 || told.contains("another") {
                    assert!(why.contains(told), "{why}");
                }
                (program.sampler, program.requests, program.tokenizer.vocab_size) = (sampler, requests, vocab_size);
            }
            answer_all(&mut program, &control);
            finish(&mut program).unwrap();
        },
    );
}

#[test]
fn ranks_with_other_tokenizers_are_told() {
    on_all(ranks(vec![replicas(1), replicas(1)], 1), |rank, control| {
        let mut program = program(1.0);
        if rank == 1 {
            program.swap_tokens(b'x'.into(), b'y'.into());
        }
        let why = inference(&mut program, &control).unwrap_err().to_string();
        assert!(why.starts_with("rank 1 has another tokenizer than rank 0"), "{why}");
        assert!(program.rows().iter().all(Vec::is_empty));
        finish(&mut program).unwrap();
    });
}

/// A device has room for 16 positions, and requests have more.
#[test]
fn requests_run_on_the_ranks_that_have_room_for_them() {
    let small = || Control {
        blocks: [(0, 2)].into(),
        ..replicas(1)
    };
    check_all(vec![small(), replicas(1)], 1.0);
    check_all(vec![replicas(1), small(), small()], 1.0);
    // Of two devices of a rank one has room; when it is lost, the other rank gets what it had.
    let loses = || Control {
        blocks: [(0, 2)].into(),
        ..failing(&[(1, 5)])
    };
    check_all(vec![loses(), replicas(1)], 1.0);
    check_all(vec![replicas(1), loses()], 1.0);
}

#[test]
fn ranks_with_other_weights_are_told() {
    let with = |fingerprint| Control {
        fingerprint,
        ..replicas(1)
    };
    // A rank without devices has packed no weights, and is compared to none.
    let without = || Control {
        refuse: true,
        ..Control::default()
    };
    let cases = [
        (vec![with(7), with(7), with(8)], 0),
        (vec![without(), with(7), with(8)], 1),
    ];
    for (controls, first) in cases {
        on_all(ranks(controls, 1), move |_, control| {
            let mut program = program(0.0);
            let why = inference(&mut program, &control).unwrap_err().to_string();
            let told = format!("rank 2 has another model than rank {first}");
            assert!(why.starts_with(&told), "{why}");
            finish(&mut program).unwrap();
        });
    }
}

/// A failure ends the run for all ranks, and the next one begins as if nothing had been.
#[test]
fn all_ranks_are_told_when_one_fails_in_a_run() {
    // Messages of each rank before the run: two for each of warming up (twice), entering and being ready.
    const BEFORE: usize = 8;
    for failing in [0, 1] {
        for message in 1..=6 {
            // Rank 0's devices are lost at once. So rank 1 answers all, however its threads are scheduled, which takes
            // more messages than these.
            let controls = vec![failing_at_once(), replicas(1)];
            let fails = |rank| match rank == failing {
                true => Fails::At(BEFORE + message),
                false => Fails::Never,
            };
            on_all(ranks_failing(controls, fails), move |_, control| {
                let mut program = program(1.0);
                let before = program.sampler;
                let why = inference(&mut program, &control).unwrap_err().to_string();
                assert_eq!(why, format!("rank {failing} has failed: the way fails"));
                assert!(program.rows().iter().all(Vec::is_empty));
                assert_eq!(program.sampler.rng_state, before.rng_state);
                let tokens = inference(&mut program, &control).unwrap();
                check(&program, &before, tokens);
                finish(&mut program).unwrap();
            });
        }
    }
}

/// Elsewhere a failure leaves the others in the dark: they are abandoned, and nobody waits for ever.
#[test]
fn no_rank_waits_for_one_that_fails_wherever_it_does() {
    for failing in [0, 2] {
        for message in (1..=40).step_by(3) {
            let controls = vec![replicas(1), replicas(1), replicas(1)];
            let fails = |rank| match rank == failing {
                true => Fails::At(message),
                false => Fails::Never,
            };
            on_all(ranks_failing(controls, fails), move |_, control| {
                let mut program = program(1.0);
                let before = program.sampler;
                match inference(&mut program, &control) {
                    Ok(tokens) => check(&program, &before, tokens),
                    Err(_) => assert!(program.rows().iter().all(Vec::is_empty)),
                }
                finish(&mut program).unwrap();
            });
        }
    }
}

/// Rank 0 has stored answers by then.
#[test]
fn without_the_way_to_send_them_there_are_no_rows() {
    let controls = vec![replicas(1), replicas(1)];
    on_all(ranks_failing(controls, |_| Fails::Rows), |rank, control| {
        let mut program = program(1.0);
        let why = inference(&mut program, &control).unwrap_err().to_string();
        assert_eq!(why, ["the way fails", "a rank is gone"][rank]);
        assert!(program.rows().iter().all(Vec::is_empty));
        finish(&mut program).unwrap();
    });
}

/// Rank 1 has been told that it may have to open another device when rank 0 fails to tell rank 2.
#[test]
fn all_ranks_are_told_when_rank_0_fails_before_devices_are_opened_again() {
    let lost = || Control {
        fail_calls: vec![(0, 1)],
        ..replicas(1)
    };
    let fails = |rank| match rank {
        0 => Fails::EndTo(2),
        _ => Fails::Never,
    };
    on_all(ranks_failing(vec![lost(), lost(), lost()], fails), |rank, control| {
        let mut program = program(1.0);
        let before = program.sampler;
        let why = inference(&mut program, &control).unwrap_err().to_string();
        let told = "rank 0 has failed: the way fails";
        assert_eq!(why.strip_prefix("rank 0 cannot begin: ").unwrap_or(&why), told);
        assert_eq!(why.len() > told.len(), rank > 0);
        assert!(program.rows().iter().all(Vec::is_empty));
        let tokens = inference(&mut program, &control).unwrap();
        check(&program, &before, tokens);
        finish(&mut program).unwrap();
    });
}

#[test]
fn without_draws_seeds_may_differ() {
    on_all(ranks(vec![replicas(1), replicas(1)], 1), |rank, control| {
        let mut program = program(0.0);
        program.sampler.rng_state += rank as u64;
        answer_all(&mut program, &control);
        finish(&mut program).unwrap();
    });
}

#[test]
fn a_rank_that_cannot_begin_to_warm_up_is_named_and_all_may_try_again() {
    on_all(ranks(vec![replicas(1), replicas(1)], 2), |rank, control| {
        let mut program = program(1.0);
        let vocab_size = program.tokenizer.vocab_size;
        if rank == 1 {
            program.tokenizer.vocab_size = -1;
        }
        let why = warm_up(&mut program, &control).unwrap_err().to_string();
        assert!(rank == 1 || why.starts_with("rank 1 cannot begin: "), "{why}");
        program.tokenizer.vocab_size = vocab_size;
        answer_all(&mut program, &control);
        finish(&mut program).unwrap();
    });
}

/// Without an engine yet the others are on their way to warm up.
#[test]
fn arguments_that_keep_a_rank_from_warming_up_are_told() {
    on_all(ranks(vec![replicas(1), replicas(1)], 3), |rank, control| {
        let mut program = program(1.0);
        let why = if rank == 1 {
            let transformer = &raw mut *program.transformer;
            // SAFETY: the program's own struct, and NULL.
            control.with_backends(|backends| unsafe { lifecycle::warm_up(transformer, null_mut(), backends) })
        } else {
            warm_up(&mut program, &control)
        };
        let why = why.unwrap_err().to_string();
        assert!(rank == 1 || why.starts_with("rank 1 cannot begin: tokenizer"), "{why}");
        let max_token_len = program.requests.max_token_len;
        if rank == 1 {
            program.requests.max_token_len = 0;
        }
        let why = inference(&mut program, &control).unwrap_err().to_string();
        assert!(rank == 1 || why.starts_with("rank 1 cannot begin: Requests"), "{why}");
        program.requests.max_token_len = max_token_len;
        answer_all(&mut program, &control);
        finish(&mut program).unwrap();
    });
}

#[test]
fn a_rank_that_panics_leaves_the_others_with_all_answers() {
    for panicking in 0..2 {
        // Each replica gets a request before others have answered all.
        let start = Arc::new(Barrier::new(4));
        let control = |rank| Control {
            panic_at: (rank == panicking).then_some(3),
            start: Some(start.clone()),
            ..replicas(2)
        };
        on_all(ranks((0..2).map(control).collect(), 1), move |rank, control| {
            let mut program = program(1.0);
            let before = program.sampler;
            let result = catch_unwind(AssertUnwindSafe(|| inference(&mut program, &control)));
            if rank == panicking {
                let panic = result.unwrap_err();
                let words = panic.downcast_ref::<String>().expect("a panic has words");
                assert!(words.contains("the fake panics"), "{words}");
                program.sampler = before;
            } else {
                check(&program, &before, result.unwrap().unwrap());
            }
            finish(&mut program).unwrap();
        });
    }
}

#[test]
fn no_requests_are_nothing_to_do_on_all_ranks() {
    on_all(ranks(vec![replicas(1), replicas(1)], 1), |_, control| {
        let mut program = Program::new(&[], STEPS);
        assert_eq!(inference(&mut program, &control).unwrap(), 0);
        finish(&mut program).unwrap();
    });
}

/// Rank 1 exits while rank 0 waits for it. Both are the processes that the feature `mpi` finds.
#[test]
#[ignore = "mpirun starts it twice"]
fn the_job_ends_with_a_rank_that_abandons_it() {
    let transport = (BACKENDS.join)().unwrap().expect("there are two ranks");
    if transport.rank() == 1 {
        transport.abandon();
    } else {
        gather(&*transport, Vec::new()).unwrap();
    }
}
