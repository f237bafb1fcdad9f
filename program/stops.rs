//! Stop strings, found in a text that comes in pieces.

/// Looks for strings in a text.
pub struct Stops {
    strings: Vec<String>,
    text: String,
    /// The bytes of the text that no string which is still to be found can begin in.
    passed: usize,
}

/// A string that was found.
#[derive(Debug, PartialEq)]
pub struct FoundString {
    /// Where it begins in the text.
    pub at: usize,
    pub string: String,
}

impl Stops {
    pub fn new(strings: Vec<String>) -> Self {
        Self {
            strings,
            text: String::new(),
            passed: 0,
        }
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Adds to the text; gives the string that begins first, and of those the longest.
    pub fn find(&mut self, piece: &str) -> Option<FoundString> {
        self.text += piece;
        let rest = &self.text[self.passed..];
        let found = self
            .strings
            .iter()
            .filter_map(|string| Some((rest.find(string.as_str())?, string)));
        let first = found.min_by_key(|(at, string)| (*at, usize::MAX - string.len()));
        if let Some((at, string)) = first {
            return Some(FoundString {
                at: self.passed + at,
                string: string.clone(),
            });
        }
        // A string that goes on behind this text begins in its last bytes.
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        self.passed = self
            .passed
            .max(floor(&self.text, (self.text.len() + 1).saturating_sub(longest)));
        None
    }

    /// Adds to the text without looking into it.
    pub fn pass(&mut self, piece: &str) {
        self.text += piece;
        self.passed = self.text.len();
    }
}

/// The beginning of the character that the byte `at` is of.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len()))
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found, after how many pieces, and the text before it.
    fn find(strings: &[&str], pieces: &[&str]) -> Option<(usize, String, String)> {
        let mut stops = Stops::new(strings.iter().map(|string| (*string).to_owned()).collect());
        pieces.iter().enumerate().find_map(|(number, piece)| {
            let found = stops.find(piece)?;
            Some((number, found.string, stops.text()[..found.at].to_owned()))
        })
    }

    #[test]
    fn strings_are_found_across_pieces() {
        let found = |number, string: &str, before: &str| Some((number, string.to_owned(), before.to_owned()));
        assert_eq!(find(&["END"], &["an E", "N", "D of it"]), found(2, "END", "an "));
        assert_eq!(find(&["END"], &["E", "EN", "END"]), found(2, "END", "EEN"));
        assert_eq!(find(&["\n\n"], &["a\n", "b", "\n", "\n"]), found(3, "\n\n", "a\nb"));
        assert_eq!(find(&["é€"], &["é", "é", "€"]), found(2, "é€", "é"));
        assert_eq!(find(&["x"], &["", "a", ""]), None);
        assert_eq!(find(&[], &["a", "b"]), None);
        // Of several the first, and of those the longest.
        assert_eq!(find(&["c", "bc"], &["abc"]), found(0, "bc", "a"));
        assert_eq!(find(&["b", "bc"], &["abc"]), found(0, "bc", "a"));
        // One that could still become longer is found as it is.
        assert_eq!(find(&["bc", "b"], &["ab", "c"]), found(0, "b", "a"));
    }

    #[test]
    fn what_is_passed_holds_none() {
        let mut stops = Stops::new(vec!["ab".into()]);
        stops.pass("ab");
        stops.pass("a");
        assert_eq!(stops.find("b"), None);
        assert_eq!(stops.find("ab").map(|found| found.at), Some(4));
    }

    /// Every way to cut a text gives what the whole gives, as far as single characters do.
    #[test]
    fn cuts_change_nothing() {
        let text = "aabab€abaa€ba";
        for string in ["ba€", "€a", "aa€b", "b€", "bab€abaa€ba", "aabab€abaa€ba", "c"] {
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let pieces: Vec<&str> = characters.iter().map(String::as_str).collect();
            let before = find(&[string], &pieces).map(|(_, _, before)| before);
            assert_eq!(before, text.find(string).map(|at| text[..at].to_owned()), "{string}");
            for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
                let (a, b) = text.split_at(cut);
                assert_eq!(
                    find(&[string], &[a, b]).map(|(_, _, before)| before),
                    before,
                    "{string} {cut}"
                );
            }
        }
    }
}
