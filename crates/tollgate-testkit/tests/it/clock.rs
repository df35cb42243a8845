//! A time of day that steps.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use tollgate_testkit::{RedisServer, ServerProgram, SteppedClock};

#[test]
fn a_server_follows_every_step() {
    for program in [ServerProgram::Redis, ServerProgram::Valkey] {
        let clock = SteppedClock::new();
        let mut server = RedisServer::build().program(program).clock(&clock).start();
        for offset_us in [0, 3_600_000_000, -3_600_000_000, 1_500_000, -250_000, 0] {
            clock.step(offset_us);
            let before_us = now_us();
            let shown_us = server_us(&server) - i128::from(offset_us);
            // A server may tell the time at which it began to look for questions, not the one at which it answers.
            let range_us = before_us - 5_000..=now_us() + 5_000;
            assert!(range_us.contains(&shown_us), "{program:?} after a step to {offset_us}: {shown_us}");
        }
        clock.step(-86_400_000_000);
        server.restart();
        assert!(server_us(&server) < now_us() - 86_000_000_000);
    }
}

#[test]
fn time_since_boot_is_unchanged_by_a_fake_clock() {
    let clock = SteppedClock::new();
    clock.step(3_600_000_000);
    let mut python = Command::new("python3");
    python.args(["-c", "import time; print(time.time(), time.clock_gettime(time.CLOCK_MONOTONIC))"]);
    let seconds = |command: &mut Command| -> Vec<f64> {
        let output = command.output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        printed.split_whitespace().map(|word| word.parse().unwrap()).collect()
    };
    let true_times = seconds(&mut python);
    let times = seconds(python.envs(clock.environment()));
    assert!((3_600.0..3_610.0).contains(&(times[0] - true_times[0])), "{times:?} {true_times:?}");
    assert!((0.0..10.0).contains(&(times[1] - true_times[1])), "{times:?} {true_times:?}");
}

fn server_us(server: &RedisServer) -> i128 {
    let time = server.cli(&["TIME"]);
    let numbers: Vec<i128> = time.lines().map(|line| line.parse().unwrap()).collect();
    numbers[0] * 1_000_000 + numbers[1]
}

fn now_us() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros().try_into().unwrap()
}
