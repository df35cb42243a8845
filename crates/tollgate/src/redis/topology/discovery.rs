//! Finds the primary by asking the sentinels, or the owners of all slots by asking the servers of a cluster.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use redis::{Cmd, RedisResult, Value};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::redis::error::{StoreError, connect_error, is_refusal};
use crate::redis::server::{ConnectOptions, PAUSE_MAX, PAUSE_REFUSED, jittered};
use crate::redis::topology::{Routes, host_or};
use crate::redis::url::{Address, Shape};

/// The shortest pause between two searches.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// The pause before a search that no caller has asked for.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long a sentinel may be silent before the subscription is renewed.
const SUBSCRIBE_EVERY: Duration = Duration::from_secs(60);

impl Routes {
    /// Searches for the servers of the store, again and again.
    pub(crate) async fn keep_looking(self: Arc<Self>) {
        let mut said: Option<String> = None;
        let mut pause = LOOK_PAUSE;
        // Each search begins with the next seed, so that no wrong answer lasts.
        for first in (0..).map(|look: usize| look % self.seeds.len().max(1)) {
            let found = match &self.shape {
                Shape::Standalone => return,
                Shape::Sentinel { master } => {
                    self.find_primary(master, first).await.map(|primary| vec![(primary, 0..=0)])
                }
                Shape::Cluster => self.find_slots(first).await,
            };
            match found {
                Ok(found) => {
                    said = None;
                    pause = LOOK_PAUSE;
                    self.replace(found);
                }
                Err(why) => {
                    let text = why.to_string();
                    if said.as_ref() != Some(&text) {
                        tracing::warn!("{text}");
                    }
                    said = Some(text);
                    let refused = matches!(why, StoreError::Refused { .. });
                    self.table.write().why = Some(why);
                    self.changed.notify_waiters();
                    // The next search needs no other reason.
                    self.doubt.notify_one();
                    sleep(jittered(if refused { PAUSE_REFUSED } else { pause })).await;
                    pause = PAUSE_MAX.min(pause * 2);
                }
            }
            sleep(LOOK_PAUSE).await;
            // A timeout is a reason to search too.
            let _ = timeout(LOOK_EVERY, self.doubt.notified()).await;
        }
    }

    /// Asks the sentinels for the primary.
    async fn find_primary(&self, master: &str, first: usize) -> Result<Address, StoreError> {
        let mut ask = Cmd::new();
        ask.arg("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(master);
        let primary = |answer, sentinel: &Address| match redis::from_redis_value(answer) {
            Ok(Some((host, port))) => Ok(Address::Tcp { host, port }),
            Ok(None) => Err(StoreError::Refused {
                server: sentinel.to_string().into(),
                why: format!("it knows no master named {master}").into(),
                hint: "look at the name at the end of the store's URL",
            }),
            Err(error) => Err(connect_error(&error.into(), &sentinel.to_string().into())),
        };
        self.ask_seeds(&self.sentinel_options, first, &ask, primary).await
    }

    /// Asks one seed after another, from number `first` on, until `read` understands an answer.
    async fn ask_seeds<T>(
        &self,
        options: &ConnectOptions,
        first: usize,
        ask: &Cmd,
        read: impl Fn(Value, &Address) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut why = self.not_yet();
        for seed in self.seeds.iter().cycle().skip(first).take(self.seeds.len()) {
            let name: Arc<str> = seed.to_string().into();
            let asked = async {
                let mut connection = options.connect(seed).await?;
                ask.query_async::<Value>(&mut connection).await
            };
            let answer = match timeout(options.connect_timeout, asked).await {
                Ok(Ok(answer)) => read(answer, seed),
                Ok(Err(error)) => Err(connect_error(&error, &name)),
                Err(_) => Err(StoreError::Unreachable { server: name, why: "no answer in time".into() }),
            };
            match answer {
                Ok(found) => return Ok(found),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// Subscribes to one sentinel while the engine lives, to follow a new primary at once.
    pub(crate) async fn watch_switches(self: Arc<Self>, sentinel: Address, master: String) {
        loop {
            let subscribe = async {
                let mut events = self.sentinel_options.client(&sentinel)?.get_async_pubsub().await?;
                events.subscribe("+switch-master").await?;
                RedisResult::Ok(events)
            };
            let mut pause = PAUSE_MAX;
            let subscribed = timeout(self.sentinel_options.connect_timeout, subscribe).await;
            if matches!(&subscribed, Ok(Err(error)) if is_refusal(error)) {
                pause = PAUSE_REFUSED;
            }
            if let Ok(Ok(events)) = subscribed {
                let mut events = events.into_on_message();
                // Renewed from time to time: a connection that broke unnoticed would stay silent.
                while let Ok(Some(event)) = timeout(SUBSCRIBE_EVERY, events.next()).await {
                    let event: String = event.get_payload().unwrap_or_default();
                    if event.split(' ').next() == Some(&master) {
                        tracing::info!(%event, "the sentinels have switched to another primary");
                        self.doubt.notify_one();
                    }
                }
            }
            sleep(jittered(pause)).await;
        }
    }

    /// Asks the servers of a cluster for the owners of all slots.
    async fn find_slots(&self, first: usize) -> Result<Vec<(Address, RangeInclusive<u16>)>, StoreError> {
        let mut ask = Cmd::new();
        ask.arg("CLUSTER").arg("SLOTS");
        let deadline = || Instant::now() + self.options.connect_timeout;
        let known: Vec<_> = self.table.read().servers.clone();
        for server in
            known.iter().cycle().skip(first).take(known.len()).filter(|server| server.health().is_ok())
        {
            let Ok(mut borrowed) = server.borrow(0, deadline()).await else { continue };
            let answer = timeout_at(deadline(), ask.query_async(&mut borrowed.connection)).await;
            if let Ok(Ok(slots)) = answer
                && let Some(found) = owners(slots, &server.address).filter(|found| !found.is_empty())
            {
                return Ok(found);
            }
        }
        let slots = |answer, seed: &Address| {
            let found = owners(answer, seed).filter(|found| !found.is_empty());
            let (server, why) = (seed.to_string().into(), "it knows of no slots".into());
            found.ok_or(StoreError::Unreachable { server, why })
        };
        self.ask_seeds(&self.options, first, &ask, slots).await
    }
}

/// The primaries and their slots, as CLUSTER SLOTS lists them.
fn owners(slots: Value, by: &Address) -> Option<Vec<(Address, RangeInclusive<u16>)>> {
    let Value::Array(ranges) = slots else { return None };
    let number = |value: Option<&Value>| match value {
        Some(Value::Int(number)) => u16::try_from(*number).ok(),
        _ => None,
    };
    let mut found = Vec::with_capacity(ranges.len());
    for range in ranges {
        let Value::Array(range) = range else { return None };
        let (first, last) = (number(range.first())?, number(range.get(1))?);
        let Some(Value::Array(primary)) = range.get(2) else { return None };
        let host = match primary.first() {
            Some(Value::BulkString(host)) => String::from_utf8_lossy(host).into_owned(),
            _ => String::new(),
        };
        let port = number(primary.get(1))?;
        found.push((Address::Tcp { host: host_or(&host, by), port }, first..=last));
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn range(first: i64, last: i64, host: Value, port: i64) -> Value {
        let primary = Value::Array(vec![host, Value::Int(port), text("id")]);
        Value::Array(vec![Value::Int(first), Value::Int(last), primary])
    }

    #[test]
    fn slots_are_read_with_every_form_of_host() {
        let by = Address::Tcp { host: "10.0.0.1".into(), port: 7000 };
        let slots = vec![
            range(0, 5, text("10.0.0.2"), 1),
            range(6, 6, text(""), 2),
            range(7, 8, Value::Nil, 3),
            range(9, 9, text("?"), 4),
            range(10, 16_383, text("2001:db8::1"), 5),
        ];
        let found: Vec<_> = owners(Value::Array(slots), &by)
            .unwrap_or_default()
            .into_iter()
            .map(|(address, slots)| (address.to_string(), *slots.start(), *slots.end()))
            .collect();
        let expected = [
            ("10.0.0.2:1", 0, 5),
            ("10.0.0.1:2", 6, 6),
            ("10.0.0.1:3", 7, 8),
            ("10.0.0.1:4", 9, 9),
            ("[2001:db8::1]:5", 10, 16_383),
        ];
        assert_eq!(found, expected.map(|(address, first, last)| (address.to_owned(), first, last)));
        assert_eq!(owners(Value::Array(vec![]), &by), Some(vec![]));
        assert_eq!(owners(Value::Int(1), &by), None);
        assert_eq!(owners(Value::Array(vec![range(0, 99_999, text("a"), 1)]), &by), None);
    }
}
