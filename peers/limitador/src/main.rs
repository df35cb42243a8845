//! `limitador-peer URL KEYS TASKS MILLIS`: checks on so many keys (1: a hot one) by so many tasks, and prints how many a second.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limitador::AsyncRateLimiter;
use limitador::limit::{Condition, Limit};
use limitador::storage::redis::AsyncRedisStorage;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, keys, tasks, millis] =
        <[String; 4]>::try_from(arguments).map_err(|_| "URL KEYS TASKS MILLIS")?;
    let (keys, tasks, millis): (u64, u64, u64) = (keys.parse()?, tasks.parse()?, millis.parse()?);
    let storage = AsyncRedisStorage::new(&url).await?;
    let limiter = AsyncRateLimiter::new_with_storage(Box::new(storage));
    limiter.add_limit(Limit::new("bench", 1_000_000_000, 60, Vec::<Condition>::new(), ["user"]));
    let (limiter, checked) = (Arc::new(limiter), Arc::new(AtomicU64::new(0)));
    for task in 0..tasks {
        let (limiter, checked) = (Arc::clone(&limiter), Arc::clone(&checked));
        tokio::spawn(async move {
            let namespace = "bench".into();
            let mut number = task;
            loop {
                // Any order does, as long as tasks seldom meet.
                number =
                    number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let values =
                    HashMap::from([("user".to_owned(), format!("user:{:012}", (number >> 33) % keys))]);
                let answer = limiter.check_rate_limited_and_update(&namespace, &values, 1, false).await;
                checked.fetch_add(u64::from(answer.is_ok()), Ordering::Relaxed);
            }
        });
    }
    // The first moments fill caches and connections.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (before, start) = (checked.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(Duration::from_millis(millis)).await;
    println!("{:.0}", (checked.load(Ordering::Relaxed) - before) as f64 / start.elapsed().as_secs_f64());
    Ok(())
}
