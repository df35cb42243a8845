//! Texts without characters that a terminal or a log viewer would act on.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes control characters and those that change the direction of text, as JSON does: `\n`, `\u202e`.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            c if is_hidden(c) => {
                // Writing to a String does not fail. All of these characters have at most four digits.
                let _ = write!(escaped, "\\u{:04x}", u32::from(c));
            }
            c => escaped.push(c),
        }
    }
    Cow::Owned(escaped)
}

/// Control characters, line separators, marks and overrides of direction, and the invisible byte order mark.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_direction_characters_are_escaped_and_others_are_not() {
        assert_eq!(escaped("user:Grüße 漢字 ✓"), "user:Grüße 漢字 ✓");
        assert_eq!(
            escaped("a\nb\r\t\u{1b}[31m\u{7f}\u{9b}\u{202e}x\u{2066}\u{200f}"),
            "a\\nb\\r\\t\\u001b[31m\\u007f\\u009b\\u202ex\\u2066\\u200f"
        );
    }
}
