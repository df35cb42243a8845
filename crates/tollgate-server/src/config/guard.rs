//! What happens while the store does not decide, from what was written of it.

use tollgate::{BreakerConfig, BreakerError, GuardConfig, MemoryConfig, TokenBucket};

use super::file;

pub(super) fn validate(guard: &file::Guard, report: &mut dyn FnMut(&str, String)) -> GuardConfig {
    let ceiling = guard.open_ceiling.as_ref().and_then(|ceiling| {
        let made = TokenBucket::new(ceiling.burst, ceiling.rate.0);
        made.map_err(|why| report("guard.open_ceiling", why.to_string())).ok()
    });
    let max_keys = usize::try_from(guard.local_max_keys).unwrap_or(usize::MAX);
    GuardConfig {
        share: guard.local_share.0,
        local: MemoryConfig { max_keys },
        ceiling,
        ..GuardConfig::default()
    }
}

pub(super) fn breaker(breaker: &file::Breaker, report: &mut dyn FnMut(&str, String)) -> BreakerConfig {
    let made = BreakerConfig::new(
        breaker.failure_rate_threshold,
        breaker.sliding_window_size,
        breaker.wait_duration_in_open_state.0.into(),
        breaker.permitted_calls_in_half_open_state,
    );
    made.unwrap_or_else(|why| {
        let field = match why {
            BreakerError::FailureRate => "guard.breaker.failure_rate_threshold",
            BreakerError::Window => "guard.breaker.sliding_window_size",
            BreakerError::Probes => "guard.breaker.permitted_calls_in_half_open_state",
        };
        report(field, why.to_string());
        BreakerConfig::default()
    })
}
