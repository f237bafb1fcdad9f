//! Several replicas behind one queue: answers are the same for any number of replicas and any depth, and whichever call
//! of whichever replica fails. Rows are well formed even if no replica is left to answer them.

mod fake;

use fake::{
    Control, PROMPTS, Program, expected, expected_drawn, expected_ending, finish, inference, last_error, warm_up,
};
use std::ffi::c_int;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier};

const STEPS: usize = 32;

/// A program whose runs write no lines on stderr: thousands of them, which no test here reads.
fn program_of(prompts: &[&str], steps: usize) -> Program {
    fake::silent();
    Program::new(prompts, steps)
}

fn program(temperature: f32) -> Program {
    let mut program = program_of(&PROMPTS, STEPS);
    program.sampler.temperature = temperature;
    program
}

/// Fails where replicas are never asked to sample: a test of that would do nothing.
#[track_caller]
fn may_draw() {
    assert!(
        getp::sampler::device_may_draw(1.0),
        "cannot be tested here: this C library's expf is not the one that replicas compute"
    );
}

/// The rows the program should have.
fn answers(program: &Program) -> Vec<Vec<c_int>> {
    let rows = PROMPTS.iter().enumerate();
    rows.map(|(i, prompt)| expected(prompt, STEPS, &program.sampler, i).0)
        .collect()
}

/// Answers all prompts by replicas that sample, and checks every answer and the sampler's final state.
fn check_drawn(topp: f32, control: &Arc<Control>) {
    let mut program = program(1.0);
    program.sampler.topp = topp;
    let before = program.sampler;
    let expected: Vec<_> = (0..)
        .zip(PROMPTS)
        .map(|(i, prompt)| expected_drawn(prompt, STEPS, &before, i, control))
        .collect();
    inference(&mut program, control).unwrap();
    let rows: Vec<_> = expected.iter().map(|(row, _)| row.clone()).collect();
    assert_eq!(program.rows(), rows);
    assert_eq!(program.sampler.rng_state, expected[0].1);
    finish(&mut program).unwrap();
}

/// Answers prompts in so many steps and checks every answer.
fn check(prompts: &[&str], steps: usize, temperature: f32, control: &Arc<Control>) {
    let mut program = program_of(prompts, steps);
    program.sampler.temperature = temperature;
    let before = program.sampler;
    let answers: Vec<_> = (0..)
        .zip(prompts)
        .map(|(i, prompt)| expected(prompt, steps, &before, i))
        .collect();
    let rows: Vec<_> = answers.iter().map(|(row, _)| row.clone()).collect();
    let tokens = inference(&mut program, control).unwrap();
    assert_eq!(program.rows(), rows);
    assert_eq!(tokens as usize, rows.iter().map(Vec::len).sum::<usize>());
    assert_eq!(
        program.sampler.rng_state, answers[0].1,
        "request 0 draws from the sampler's own stream"
    );
    finish(&mut program).unwrap();
    assert_eq!(control.opened.load(SeqCst), control.dropped.load(SeqCst));
}

#[test]
fn answers_do_not_depend_on_number_or_depth() {
    for replicas in [1, 2, 3, 8, 20] {
        for depth in [1, 2, 3] {
            for temperature in [0.0, 1.0] {
                let control = Arc::new(Control {
                    replicas,
                    depth,
                    ..Control::default()
                });
                check(&PROMPTS, STEPS, temperature, &control);
                assert_eq!(control.opened.load(SeqCst), replicas);
            }
        }
    }
}

#[test]
fn end_tokens_end_answers_at_any_depth() {
    for replicas in [1, 3] {
        for depth in [1, 2, 3] {
            for end_every in [2, 7, 30] {
                let mut program = program(0.0);
                let control = Arc::new(Control {
                    replicas,
                    depth,
                    end_every,
                    ..Control::default()
                });
                inference(&mut program, &control).unwrap();
                let rows = PROMPTS.map(|prompt| expected_ending(prompt, STEPS, end_every));
                assert_eq!(program.rows(), rows, "{replicas} replicas, {depth} steps, {end_every}");
                finish(&mut program).unwrap();
            }
        }
    }
}

#[test]
fn tokens_drawn_by_replicas_are_those_the_host_draws() {
    may_draw();
    for (replicas, depth) in [(1, 1), (1, 2), (1, 3), (3, 2)] {
        for host_every in [0, 1, 2, 3, 20] {
            for (end_every, topp) in [(0, 0.9), (7, 0.9), (30, 1.0)] {
                let control = Arc::new(Control {
                    replicas,
                    depth,
                    end_every,
                    draws: true,
                    host_every,
                    ..Control::default()
                });
                // End tokens come from the replica alone, which a step of whole rows does not ask.
                if end_every == 0 || host_every > 3 || host_every == 0 {
                    check_drawn(topp, &control);
                    assert_eq!(control.fetched.load(SeqCst) > 0, host_every > 0);
                }
            }
        }
    }
}

#[test]
fn sequences_go_on_while_replicas_draw_and_take_turns_while_the_host_does() {
    may_draw();
    for (draws, host_every, widest) in [(true, 0, 8), (true, 1, 8), (false, 0, 4)] {
        let control = Arc::new(Control {
            depth: 2,
            draws,
            host_every,
            ..Control::default()
        });
        let mut program = program_of(&["x"; 8], 40);
        program.sampler.temperature = 1.0;
        inference(&mut program, &control).unwrap();
        finish(&mut program).unwrap();
        assert_eq!(control.widest.lock().unwrap()[&0], widest);
        // Twice 64 rows, 32 steps of whole rows between them, and the steps in flight.
        let fetched = if host_every == 1 { 128..140 } else { 0..1 };
        let rows = control.fetched.load(SeqCst);
        assert!(fetched.contains(&rows), "{rows} rows");
    }
}

#[test]
fn any_call_may_fail_while_replicas_draw() {
    may_draw();
    for call in 1.. {
        let control = Arc::new(Control {
            replicas: 2,
            depth: 2,
            draws: true,
            host_every: 3,
            fail_calls: vec![(0, call)],
            ..Control::default()
        });
        check_drawn(0.9, &control);
        if control.failed_calls.load(SeqCst) == 0 {
            break;
        }
    }
}

#[test]
fn replicas_with_room_for_everything_share_evenly() {
    for (replicas, share) in [(2, 4), (3, 3), (8, 1)] {
        let mut program = program_of(&["x"; 8], 8);
        let control = Arc::new(Control {
            replicas,
            start: Some(Barrier::new(replicas).into()),
            ..Control::default()
        });
        inference(&mut program, &control).unwrap();
        finish(&mut program).unwrap();
        let widest: Vec<_> = control.widest.lock().unwrap().values().copied().collect();
        assert_eq!(
            (widest.len(), widest.iter().max()),
            (replicas, Some(&share)),
            "{widest:?}"
        );
    }
}

/// Fails each call of each replica in turn: the first, the second, and so on until the run makes fewer calls. A
/// replica has room for four of these requests at their longest, for more of different ages: then it takes fewer
/// steps than four waves.
#[test]
fn starts_are_spread_where_more_wait_than_have_room() {
    let control = Arc::new(Control {
        // 16 full ones each, and a ring of 2.
        blocks: [(0, 4 * (16 + 2))].into(),
        ..Control::default()
    });
    check(&["a"; 16], 250, 0.0, &control);
    assert_eq!(control.steps.load(SeqCst), 794);
}

#[test]
fn any_call_may_fail() {
    for (replicas, depth, temperature) in [(1, 1, 0.0), (1, 2, 1.0), (2, 1, 1.0), (2, 2, 0.0), (3, 2, 1.0)] {
        for replica in 0..replicas {
            for call in 1.. {
                let control = Arc::new(Control {
                    replicas,
                    depth,
                    fail_calls: vec![(replica, call)],
                    ..Control::default()
                });
                check(&PROMPTS[1..8], 10, temperature, &control);
                let failed = control.failed_calls.load(SeqCst);
                let fallbacks = if replicas == 1 { failed } else { 0 };
                assert_eq!(control.fallbacks.load(SeqCst), fallbacks);
                if failed == 0 {
                    break;
                }
            }
        }
    }
}

#[test]
fn when_all_fail_the_fallback_answers() {
    for (replicas, depth, temperature) in [(1, 2, 0.0), (2, 1, 1.0), (3, 2, 0.0), (8, 2, 1.0)] {
        for call in [1, 2, 5, 9] {
            let control = Arc::new(Control {
                replicas,
                depth,
                fail_calls: (0..replicas).map(|replica| (replica, call)).collect(),
                ..Control::default()
            });
            check(&PROMPTS, STEPS, temperature, &control);
            // With so few calls to make, some replicas may be done before they would fail.
            let all_failed = control.failed_calls.load(SeqCst) == replicas;
            assert!(control.fallbacks.load(SeqCst) <= usize::from(all_failed));
        }
    }
}

#[test]
fn a_replica_that_failed_is_not_asked_again() {
    let control = Arc::new(Control {
        replicas: 2,
        depth: 2,
        // Both begin a step; one fails after it.
        start: Some(Barrier::new(2).into()),
        fail_calls: vec![(0, 2)],
        ..Control::default()
    });
    let mut program = program(0.0);
    let rows = answers(&program);
    warm_up(&mut program, &control).unwrap();
    assert_eq!(program.transformer.weights.out.addr(), 0x1000);
    for _ in 0..2 {
        inference(&mut program, &control).unwrap();
        assert_eq!(program.rows(), rows);
        assert_eq!(control.dropped.load(SeqCst), 1);
    }
    finish(&mut program).unwrap();
    assert_eq!((control.opened.load(SeqCst), control.fallbacks.load(SeqCst)), (2, 0));
}

#[test]
fn without_a_fallback_rows_are_empty_and_the_next_inference_tries_again() {
    for (replicas, depth) in [(1, 1), (1, 2), (3, 2)] {
        let control = Arc::new(Control {
            replicas,
            depth,
            fail_calls: (0..replicas).map(|replica| (replica, 1)).collect(),
            refuse_fallback: 2.into(),
            ..Control::default()
        });
        let mut program = program(0.0);
        let rows = answers(&program);
        let error = inference(&mut program, &control).unwrap_err();
        assert_eq!(error.to_string(), "the fake's call fails");
        assert!(program.rows().iter().all(Vec::is_empty));
        let error = inference(&mut program, &control).unwrap_err();
        assert_eq!(error.to_string(), "the fake has no fallback");
        assert!(program.rows().iter().all(Vec::is_empty));
        inference(&mut program, &control).unwrap();
        assert_eq!(program.rows(), rows);
        finish(&mut program).unwrap();
        assert_eq!(control.opened.load(SeqCst), control.dropped.load(SeqCst));
    }
}

#[test]
fn what_was_answered_before_all_failed_stays() {
    // The first prompt fills its steps, so that it is answered by its first token.
    let mut program = program_of(&["12345678", "ab", "x", "y"], 8);
    let control = Arc::new(Control {
        depth: 2,
        fail_calls: vec![(0, 8)],
        refuse_fallback: 1.into(),
        ..Control::default()
    });
    assert_eq!(inference(&mut program, &control).unwrap(), 1);
    assert_eq!(program.rows().iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 0, 0]);
    finish(&mut program).unwrap();
}

#[test]
fn a_panic_sends_all_replicas_home() {
    for (replicas, depth) in [(1, 2), (2, 1), (3, 2)] {
        let control = Arc::new(Control {
            replicas,
            depth,
            panic_at: Some(3),
            ..Control::default()
        });
        let mut program = program(0.0);
        let tokens = getp::abi::guard::work(-1, || inference(&mut program, &control));
        assert_eq!(tokens, -1);
        assert!(last_error().unwrap().contains("the fake panics"));
        program.rows().iter().zip(answers(&program)).for_each(|(row, answer)| {
            assert!(row.is_empty() || *row == answer);
        });
        // Replicas that had not reached their third step panic now. They leave no step that the next inference could
        // mistake for its own.
        let rows = answers(&program);
        let answered = (0..replicas).any(|_| getp::abi::guard::work(-1, || inference(&mut program, &control)) >= 0);
        assert!(answered);
        assert_eq!(program.rows(), rows);
        finish(&mut program).unwrap();
    }
}

/// Of three replicas the first has room for 16 positions, a request has 32.
#[test]
fn a_request_runs_where_it_has_room() {
    for (replicas, depth) in [(2, 1), (3, 2)] {
        let control = Arc::new(Control {
            replicas,
            depth,
            blocks: [(0, 2)].into(),
            ..Control::default()
        });
        check(&PROMPTS, STEPS, 1.0, &control);
        let widest = control.widest.lock().unwrap();
        assert!(!widest.contains_key(&0), "{widest:?}");
        // A replica that only waits takes no share of the requests. Of two others one may have answered all before the
        // second begins.
        assert!(replicas > 2 || *widest == [(1, 8)].into(), "{widest:?}");
    }
}

#[test]
fn what_only_a_lost_replica_had_room_for_runs_on_the_one_that_stands_in() {
    for call in [1, 2, 9] {
        let control = |refuse_fallback: usize| {
            Arc::new(Control {
                replicas: 2,
                depth: 2,
                blocks: [(0, 2)].into(),
                fail_calls: vec![(1, call)],
                refuse_fallback: refuse_fallback.into(),
                ..Control::default()
            })
        };
        check(&PROMPTS, STEPS, 1.0, &control(0));

        // Where none stands in, that is the failure of the run.
        let mut program = program(1.0);
        let why = inference(&mut program, &control(1)).unwrap_err().to_string();
        assert!(why.contains("the fake's call fails"), "{why}");
        assert!(program.rows().iter().all(Vec::is_empty));
        finish(&mut program).unwrap();
    }
}
