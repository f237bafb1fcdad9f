//! Escapes control characters in text that the library did not write itself (paths, tensor names, tokens), so that it
//! cannot control the user's terminal. Escapes are written as in Rust's strings.

use crate::error::Result;
use crate::memory::{self, Purpose};

/// `text` on one line: control characters, newlines among them, and characters that change the direction of writing are
/// escaped.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    push(&mut shown, text, |_| false);
    shown
}

/// `bytes` with control characters, characters that change the direction of writing, and bytes that are not UTF-8
/// escaped. Newlines and tabs are not escaped.
pub fn for_terminal(bytes: &[u8]) -> Result<Vec<u8>> {
    // The longest escape of a byte is `\u{1b}`.
    let most = bytes.len().saturating_mul(6);
    let mut shown = String::new();
    let room = shown.try_reserve(most);
    room.map_err(|_| memory::lacking::<u8>(most, Purpose::Print))?;
    for chunk in bytes.utf8_chunks() {
        push(&mut shown, chunk.valid(), |c| matches!(c, '\n' | '\t'));
        for byte in chunk.invalid() {
            shown.extend(byte.escape_ascii().map(char::from));
        }
    }
    Ok(shown.into_bytes())
}

fn push(shown: &mut String, text: &str, stays: impl Fn(char) -> bool) {
    for c in text.chars() {
        match steers(c) && !stays(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
}

/// Whether `c` is a control character (C0, DEL, C1), or embeds, overrides or isolates a direction of writing.
fn steers(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_shown() {
        let text = "a\u{1b}[31mb\u{7}\u{9b}2J\u{202e}c\u{2066}\n\t\r\u{7f}\u{e9}\u{4e2d}\\";
        let line = "a\\u{1b}[31mb\\u{7}\\u{9b}2J\\u{202e}c\\u{2066}\\n\\t\\r\\u{7f}\u{e9}\u{4e2d}\\";
        assert_eq!(escaped(text), line);
        assert_eq!(
            for_terminal(text.as_bytes()).unwrap(),
            line.replace("\\n\\t", "\n\t").as_bytes()
        );
    }

    #[test]
    fn bytes_that_are_no_text_are_shown() {
        assert_eq!(
            for_terminal(b"\x9b31m \xe4\xb8 \xff").unwrap(),
            b"\\x9b31m \\xe4\\xb8 \\xff"
        );
    }
}
