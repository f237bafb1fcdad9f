//! A rank's side of a run: when it reports to rank 0, and how many requests it asks for.

use std::time::Duration;

/// The most requests to ask for at once.
const MOST: usize = 4096;

/// A rank's queue, as it is when the rank may report.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Devices that work.
    pub devices: usize,
    /// Requests that wait in the rank's own queue.
    pub waiting: usize,
    /// Requests that devices have started since the last report.
    pub started: usize,
    /// Whether a device could have started one more since then, but the queue was empty.
    pub starved: bool,
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
/// A request that waits here could run elsewhere, so as few wait as will do: twice as many as devices started between
/// two reports, and twice as many as before if a device found none. If there are more than twice as many as that, the
/// others go back.
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
    /// Whether rank 0 had nothing for the rank, and nothing has changed since.
    in_vain: bool,
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
            in_vain: false,
            first: true,
        }
    }

    /// Whether a report may be sent, `now` after the run's beginning.
    pub fn may_report(&self, now: Duration) -> bool {
        !self.under_way && now >= self.next
    }

    /// To be asked when a report may be sent: what to wish for in it, or `None` if there is nothing to report.
    pub fn report(&mut self, now: Duration, seen: Seen) -> Option<Wish> {
        let needed = if seen.starved {
            2 * self.target
        } else {
            2 * seen.started
        };
        self.target = match seen.devices {
            0 => 0,
            devices => needed.max(devices).min(MOST.max(devices)),
        };
        let most = 2 * self.target;
        let back = if seen.waiting > most {
            seen.waiting - self.target
        } else {
            0
        };
        self.in_vain &= !seen.news;
        let ask = if self.in_vain {
            0
        } else {
            self.target.saturating_sub(seen.waiting)
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

    /// Learns how many requests the reply to the report has granted.
    pub fn reply(&mut self, granted: usize) {
        self.under_way = false;
        self.in_vain = self.asked > 0 && granted == 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::ZERO;

    fn wish(ask: usize, back: usize) -> Option<Wish> {
        Some(Wish { ask, back })
    }

    fn starved(devices: usize) -> Seen {
        Seen {
            devices,
            starved: true,
            ..Seen::default()
        }
    }

    #[test]
    fn a_rank_asks_for_more_until_its_devices_have_enough() {
        let mut stock = Stock::new(2);
        let mut now = START;
        for asks in [4, 8, 16, 32] {
            assert!(stock.may_report(now));
            assert_eq!(stock.report(now, starved(4)), wish(asks, 0));
            assert!(!stock.may_report(now + Duration::from_secs(1)), "no reply yet");
            stock.reply(asks);
            assert!(!stock.may_report(now), "too early");
            now += Duration::from_micros(40);
        }
        let enough = Seen {
            devices: 4,
            waiting: 12,
            started: 3,
            ..Seen::default()
        };
        assert_eq!(stock.report(now, enough), None);
        assert_eq!(stock.report(now, Seen { waiting: 1, ..enough }), wish(5, 0));
    }

    #[test]
    fn who_got_nothing_asks_again_when_something_has_changed() {
        let mut stock = Stock::new(1);
        assert_eq!(stock.report(START, starved(1)), wish(1, 0));
        stock.reply(0);
        let later = Duration::from_secs(1);
        assert_eq!(stock.report(later, starved(1)), None);
        let news = Seen {
            news: true,
            ..starved(1)
        };
        assert_eq!(stock.report(later, news), wish(4, 0));
    }

    #[test]
    fn what_is_too_much_goes_back() {
        let mut stock = Stock::new(1);
        let seen = Seen {
            devices: 2,
            waiting: 13,
            started: 3,
            ..Seen::default()
        };
        assert_eq!(stock.report(START, seen), wish(0, 7));
        stock.reply(0);
        let later = Duration::from_secs(1);
        assert_eq!(stock.report(later, Seen { waiting: 6, ..seen }), None);
        assert_eq!(stock.report(later, Seen { devices: 0, ..seen }), wish(0, 13));
    }

    #[test]
    fn a_rank_without_devices_reports_once_and_asks_for_nothing() {
        let mut stock = Stock::new(1);
        assert_eq!(stock.report(START, starved(0)), wish(0, 0));
        stock.reply(0);
        assert_eq!(stock.report(Duration::from_secs(1), starved(0)), None);
    }
}
