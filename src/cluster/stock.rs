//! A rank's side of a run: when it reports to rank 0, and how many requests it asks for.

use std::time::Duration;

/// The most requests to ask for at once.
const MOST: usize = 4096;

/// The first and the longest time until a rank that got nothing asks again.
const FIRST_WAIT: Duration = Duration::from_millis(5);
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// A rank's queue, as it is when the rank may report.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Devices that work.
    pub devices: usize,
    /// Requests that wait in the rank's own queue.
    pub waiting: usize,
    /// How often devices have looked for requests since the last report: once a step.
    pub looks: usize,
    /// Requests that they have started since then.
    pub started: usize,
    /// Requests that they had room for and did not find, summed over their looks.
    pub wanted: usize,
    /// Whether there is something to report: answers, a device lost.
    pub news: bool,
}

/// What a report says beside the news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// How many requests to ask for.
    pub ask: usize,
    /// How many of the requests that wait go back.
    pub back: usize,
}

/// When a rank reports, and how many requests wait beside its devices.
///
/// A request that waits here could run elsewhere, so as few wait as will do: what devices had room for and did not
/// find, and twice as many as they have started between two reports. If there are more than twice as many as that, the
/// others go back. Devices look for requests once a step; until each has looked, nothing is known that was not before.
#[derive(Debug)]
pub struct Stock {
    /// The least time between two reports.
    pace: Duration,
    /// When the next report may be sent.
    pub(super) next: Duration,
    /// Whether a report has no reply yet.
    under_way: bool,
    /// How many requests are to wait here.
    target: usize,
    /// How many the last report asked for.
    asked: usize,
    /// If rank 0 had nothing for the rank and nothing has changed since: when to ask again, and the time until then.
    in_vain: Option<(Duration, Duration)>,
    /// Whether nothing has been reported yet.
    first: bool,
}

impl Stock {
    /// For one of so many ranks. All together they send rank 0 at most 50,000 reports a second.
    pub fn new(ranks: usize) -> Self {
        Self {
            pace: Duration::from_micros(20) * ranks as u32,
            next: Duration::ZERO,
            under_way: false,
            target: 0,
            asked: 0,
            in_vain: None,
            first: true,
        }
    }

    /// Whether a report may be sent, `now` after the run's beginning.
    pub fn may_report(&self, now: Duration) -> bool {
        !self.under_way && now >= self.next
    }

    /// To be asked when a report may be sent: what to wish for in it, or `None` if there is nothing to report.
    pub fn report(&mut self, now: Duration, seen: Seen) -> Option<Wish> {
        if seen.wanted > 0 || seen.looks >= seen.devices {
            // A device that has looked twice wanted the same ones twice, and others want as many.
            let wanted = (seen.wanted * seen.devices).div_ceil(seen.looks.max(1));
            self.target = 2 * seen.started + wanted;
        }
        self.target = match seen.devices {
            0 => 0,
            devices => self.target.max(devices).min(MOST.max(devices)),
        };
        let most = 2 * self.target;
        let back = if seen.waiting > most {
            seen.waiting - self.target
        } else {
            0
        };
        if seen.news {
            self.in_vain = None;
        }
        let asks = self.in_vain.is_none_or(|(again, _)| now >= again && seen.wanted > 0);
        let ask = if asks {
            self.target.saturating_sub(seen.waiting)
        } else {
            0
        };
        if ask + back == 0 && !seen.news && !self.first {
            return None;
        }
        self.first = false;
        self.under_way = true;
        self.next = now + self.pace;
        self.asked = ask;
        Some(Wish { ask, back })
    }

    /// Learns, `now` after the run's beginning, how many requests the reply to the report has granted.
    pub fn reply(&mut self, now: Duration, granted: usize) {
        self.under_way = false;
        self.in_vain = match (self.asked, granted) {
            // Others may have given some back since.
            (1.., 0) => {
                let wait = self.in_vain.map_or(FIRST_WAIT, |(_, wait)| LONGEST_WAIT.min(2 * wait));
                Some((now + wait, wait))
            }
            (0, 0) => self.in_vain,
            _ => None,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::ZERO;

    fn wish(ask: usize, back: usize) -> Option<Wish> {
        Some(Wish { ask, back })
    }

    fn wanting(devices: usize, wanted: usize) -> Seen {
        Seen {
            devices,
            looks: devices,
            wanted,
            ..Seen::default()
        }
    }

    #[test]
    fn a_rank_asks_for_what_its_devices_have_room_for() {
        let mut stock = Stock::new(2);
        assert!(stock.may_report(START));
        assert_eq!(stock.report(START, wanting(4, 800)), wish(800, 0));
        assert!(!stock.may_report(START + Duration::from_secs(1)), "no reply yet");
        stock.reply(START, 500);
        assert!(!stock.may_report(START), "too early");
        let now = START + Duration::from_micros(40);
        assert!(stock.may_report(now));
        // Devices in the middle of a step have not looked yet.
        let waiting = Seen {
            devices: 4,
            waiting: 500,
            ..Seen::default()
        };
        assert_eq!(stock.report(now, waiting), wish(300, 0));
        stock.reply(now, 300);
        let now = now + Duration::from_secs(1);
        let all_wait = Seen {
            waiting: 800,
            ..waiting
        };
        assert_eq!(stock.report(now, all_wait), None);
        let one_has_looked = Seen {
            waiting: 600,
            looks: 1,
            started: 200,
            ..waiting
        };
        assert_eq!(stock.report(now, one_has_looked), wish(200, 0));
        stock.reply(now, 200);
        let started = Seen {
            waiting: 6,
            looks: 4,
            started: 5,
            ..waiting
        };
        assert_eq!(stock.report(now, started), wish(4, 0));
    }

    #[test]
    fn who_got_nothing_asks_again_when_something_has_changed_or_after_a_while() {
        let mut stock = Stock::new(1);
        let (wanting, ms) = (wanting(1, 3), Duration::from_millis);
        assert_eq!(stock.report(START, wanting), wish(3, 0));
        stock.reply(START, 0);
        assert_eq!(stock.report(ms(4), wanting), None);
        assert_eq!(stock.report(ms(6), Seen { wanted: 0, ..wanting }), None);
        assert_eq!(stock.report(ms(6), wanting), wish(3, 0));
        stock.reply(ms(6), 0);
        assert_eq!(stock.report(ms(15), wanting), None);
        assert_eq!(stock.report(ms(15), Seen { news: true, ..wanting }), wish(3, 0));
        stock.reply(ms(15), 0);
        assert_eq!(stock.report(ms(21), wanting), wish(3, 0));
        stock.reply(ms(21), 2);
        assert_eq!(stock.report(ms(22), wanting), wish(3, 0));
    }

    #[test]
    fn what_is_too_much_goes_back() {
        let mut stock = Stock::new(1);
        let seen = Seen {
            devices: 2,
            waiting: 13,
            looks: 2,
            started: 3,
            ..Seen::default()
        };
        assert_eq!(stock.report(START, seen), wish(0, 7));
        stock.reply(START, 0);
        let later = Duration::from_secs(1);
        assert_eq!(stock.report(later, Seen { waiting: 6, ..seen }), None);
        assert_eq!(stock.report(later, Seen { devices: 0, ..seen }), wish(0, 13));
    }

    #[test]
    fn a_rank_without_devices_reports_once_and_asks_for_nothing() {
        let mut stock = Stock::new(1);
        assert_eq!(stock.report(START, wanting(0, 0)), wish(0, 0));
        stock.reply(START, 0);
        assert_eq!(stock.report(Duration::from_secs(1), wanting(0, 0)), None);
    }
}
