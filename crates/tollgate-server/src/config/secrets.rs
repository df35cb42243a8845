//! Files with secrets: keys, passwords, tokens. Mistakes name the file and the line, never what is written there.

use std::path::Path;

use crate::identity::sha256;

/// Shorter tokens could be guessed.
const TOKEN_CHARS_MIN: usize = 16;
/// Names are shown in log lines, which should stay short.
const NAME_CHARS_MAX: usize = 64;

/// A token that callers may show.
#[derive(Clone, Debug)]
pub struct Token {
    /// The name that the audit log shows; empty for tokens of the API.
    pub name: String,
    /// SHA-256 of the token.
    pub digest: [u8; 32],
}

/// Reads a file without the line end that editors add.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = std::fs::read(path).map_err(|why| format!("{} cannot be read: {why}", path.display()))?;
    let end = bytes.iter().rposition(|byte| !b"\r\n".contains(byte)).map_or(0, |last| last + 1);
    bytes.truncate(end);
    Ok(bytes)
}

/// Reads a file of text, as [`read`] does.
pub(super) fn read_text(path: &Path) -> Result<String, String> {
    String::from_utf8(read(path)?).map_err(|_| format!("{} is not UTF-8", path.display()))
}

/// Reads the tokens of the API: one on each line.
pub(super) fn api_tokens(path: &Path) -> Result<Vec<Token>, String> {
    let shown = path.display();
    tokens(path, "holds no token; expected one a line", |number, line| match line.len() {
        TOKEN_CHARS_MIN.. => Ok(("", line)),
        _ => Err(format!("line {number} of {shown}: the token has fewer than {TOKEN_CHARS_MIN} characters")),
    })
}

/// Reads the tokens of `/admin`: lines with `NAME:TOKEN`. A name may have several tokens, so that one can replace another.
pub(super) fn admin_tokens(path: &Path) -> Result<Vec<Token>, String> {
    let shown = path.display();
    tokens(path, "has no tokens; expected lines such as alice:TOKEN", |number, line| {
        named_token(line).map_err(|why| format!("{shown}:{number}: {why}"))
    })
}

/// Reads the names and tokens in the lines of a file. Empty lines and lines that begin with `#` are skipped.
fn tokens(
    path: &Path,
    none: &str,
    parse: impl Fn(usize, &str) -> Result<(&str, &str), String>,
) -> Result<Vec<Token>, String> {
    let text = read_text(path)?;
    let mut tokens = Vec::new();
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if !line.is_empty() && !line.starts_with('#') {
            let (name, token) = parse(number, line)?;
            tokens.push(Token { name: name.to_owned(), digest: sha256(token) });
        }
    }
    if tokens.is_empty() { Err(format!("{} {none}", path.display())) } else { Ok(tokens) }
}

fn named_token(line: &str) -> Result<(&str, &str), String> {
    let (name, token) = line.split_once(':').ok_or("expected NAME:TOKEN, such as alice:TOKEN")?;
    let (name, token) = (name.trim(), token.trim());
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
    if name.is_empty() || name.len() > NAME_CHARS_MAX || !name.bytes().all(is_name) {
        return Err(format!(
            "a name has 1 to {NAME_CHARS_MAX} letters, digits and the characters . _ - @, and a colon behind it"
        ));
    }
    if token.len() < TOKEN_CHARS_MIN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!("a token has at least {TOKEN_CHARS_MIN} visible ASCII characters"));
    }
    Ok((name, token))
}
