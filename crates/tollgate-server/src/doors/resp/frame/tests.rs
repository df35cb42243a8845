//! The parser on requests as clients send them, on broken ones, and on random ones that arrive in random pieces.

use super::*;

fn whole(input: &[u8]) -> (Vec<Vec<u8>>, usize) {
    let mut arguments = Vec::new();
    match parse(input, Caps::FULL, &mut arguments) {
        Ok(Parsed::Whole(bytes)) => (arguments.into_iter().map(Cow::into_owned).collect(), bytes),
        other => panic!("{other:?} for {:?}", input.escape_ascii().to_string()),
    }
}

fn words(input: &str) -> Vec<String> {
    whole(input.as_bytes()).0.into_iter().map(|word| String::from_utf8(word).unwrap()).collect()
}

fn error(input: &[u8]) -> String {
    parse(input, Caps::FULL, &mut Vec::new()).unwrap_err().to_string()
}

#[test]
fn arrays_of_bulk_strings_are_read() {
    assert_eq!(words("*1\r\n$4\r\nPING\r\n"), ["PING"]);
    assert_eq!(words("*2\r\n$4\r\nECHO\r\n$0\r\n\r\n*1"), ["ECHO", ""]);
    assert_eq!(whole(b"*2\r\n$4\r\nECHO\r\n$2\r\n\r\n\r\nnext").1, 22);
    for empty in ["*0\r\n", "*-1\r\n", "\r\n", "\n", "  \r\n"] {
        assert_eq!(whole(empty.as_bytes()), (Vec::new(), empty.len()), "{empty:?}");
    }
}

#[test]
fn inline_commands_are_split_at_spaces_and_may_be_quoted() {
    assert_eq!(words("PING\r\n"), ["PING"]);
    assert_eq!(words("  ECHO   a\t b \n"), ["ECHO", "a", "b"]);
    assert_eq!(words("ECHO \"a b\" 'c d'\r\n"), ["ECHO", "a b", "c d"]);
    assert_eq!(words("ECHO \"a\\\"\\x41\\n\" 'it\\'s \\x'\n"), ["ECHO", "a\"A\n", "it's \\x"]);
    for unbalanced in ["ECHO \"a\n", "ECHO 'a\n", "ECHO \"a\"b\n", "ECHO a\"b\"\n", "ECHO \"a\\\n"] {
        assert_eq!(
            error(unbalanced.as_bytes()),
            "Protocol error: unbalanced quotes in request",
            "{unbalanced:?}"
        );
    }
}

#[test]
fn broken_requests_get_the_errors_of_redis() {
    let long = [b"*".as_slice(), &[b'1'; 40]].concat();
    let long_bulk = [b"*1\r\n$".as_slice(), &[b'1'; 40]].concat();
    let inline = vec![b'x'; Caps::FULL.inline_bytes];
    for (input, why) in [
        (b"*x\r\n".as_slice(), "invalid multibulk length"),
        (b"*65\r\n", "invalid multibulk length"),
        (b"*01\r\n", "invalid multibulk length"),
        (b"*+1\r\n", "invalid multibulk length"),
        (b"*99999999999999999999\r\n", "invalid multibulk length"),
        (b"*1\r$", "invalid multibulk length"),
        (b"*\r\n", "invalid multibulk length"),
        (&long, "too big mbulk count string"),
        (b"*1\r\n:1\r\n", "expected '$', got ':'"),
        (b"*1\r\n\x00", "expected '$', got '\\x00'"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$16385\r\n", "invalid bulk length"),
        (b"*1\r\n$ 4\r\n", "invalid bulk length"),
        (&long_bulk, "too big bulk count string"),
        (b"*1\r\n$4\r\nPINGxx", "expected CRLF after a bulk string"),
        (&inline, "too big inline request"),
    ] {
        assert_eq!(error(input), format!("Protocol error: {why}"), "{}", input.escape_ascii());
    }
}

#[test]
fn requests_before_auth_are_small() {
    let parse =
        |input: &[u8]| parse(input, Caps::BEFORE_AUTH, &mut Vec::new()).map_err(|why| why.to_string());
    assert_eq!(parse(b"*9\r\n"), Err("Protocol error: unauthenticated multibulk length".to_owned()));
    assert_eq!(parse(b"*1\r\n$1025\r\n"), Err("Protocol error: unauthenticated bulk length".to_owned()));
    assert_eq!(parse(&[b'x'; 2048]), Err("Protocol error: too big inline request".to_owned()));
    assert_eq!(parse(b"*2\r\n$4\r\nAUTH\r\n$1\r\nx\r\n"), Ok(Parsed::Whole(21)));
}

/// The most bytes that a request can have, and so the most that are ever asked for.
const REQUEST_BYTES_MAX: usize = 64 * (16 * 1024 + 32) + 64;

/// A small random generator: the same seed gives the same inputs.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, most: usize) -> usize {
        (self.next() % most.max(1) as u64) as usize
    }
}

/// A request as a client could send it, and its arguments.
fn valid(random: &mut Random, bytes: &mut Vec<u8>) -> Vec<Vec<u8>> {
    const WORDS: [&[u8]; 8] =
        [b"CL.THROTTLE", b"TG.CHECK", b"user", b"key:1", b"15", b"", b"a b\r\n*$", &[0, 255]];
    let count = 1 + random.below(6);
    let arguments: Vec<Vec<u8>> = (0..count).map(|_| WORDS[random.below(WORDS.len())].to_vec()).collect();
    let is_plain = |word: &Vec<u8>| !word.is_empty() && word.iter().all(u8::is_ascii_graphic);
    if random.below(4) == 0 && arguments[0] != b"*" && arguments.iter().all(is_plain) {
        bytes.extend_from_slice(&arguments.join(&b' '));
        bytes.extend_from_slice(b"\r\n");
    } else {
        bytes.extend_from_slice(format!("*{count}\r\n").as_bytes());
        for argument in &arguments {
            bytes.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
            bytes.extend_from_slice(argument);
            bytes.extend_from_slice(b"\r\n");
        }
    }
    arguments
}

/// Changes an input in a way that a broken or hostile client could.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    const PIECES: [&[u8]; 10] = [
        b"*",
        b"$",
        b"\r\n",
        b"-1",
        b"99999999999999999999",
        b"\"",
        b"'",
        b"\\x4",
        b"$16384\r\n",
        b"*64\r\n",
    ];
    let at = random.below(bytes.len() + 1);
    match random.below(6) {
        0 if at < bytes.len() => bytes[at] = random.next() as u8,
        1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        2 => bytes.truncate(at),
        3 if at < bytes.len() => drop(bytes.remove(at)),
        4 => {
            let copied = bytes[at..].to_vec();
            bytes.extend_from_slice(&copied);
        }
        _ => drop(bytes.splice(at..at, PIECES[random.below(PIECES.len())].iter().copied())),
    }
}

/// All requests in `input`, and how they end: with an error, or with the beginning of a request.
fn parse_all<'a>(
    input: &'a [u8],
    caps: Caps,
    requests: &mut Vec<Vec<Argument<'a>>>,
) -> Result<usize, ProtocolError> {
    let (mut at, mut arguments) = (0, Vec::new());
    loop {
        match parse(&input[at..], caps, &mut arguments)? {
            Parsed::Whole(bytes) => {
                assert!(bytes > 0 && at + bytes <= input.len());
                at += bytes;
                requests.push(std::mem::take(&mut arguments));
            }
            Parsed::NeedsBytes(bytes) => {
                assert!(bytes > input.len() - at, "more bytes are needed than there are");
                assert!(bytes <= REQUEST_BYTES_MAX, "a request of {bytes} bytes");
                return Ok(at);
            }
        }
    }
}

/// Parses an input that arrives in random pieces, as a connection does, and compares with the input in one piece.
fn arrives_in_pieces(random: &mut Random, input: &[u8], caps: Caps) {
    let mut expected = Vec::new();
    let end = parse_all(input, caps, &mut expected);
    assert!(expected.iter().flatten().map(|argument| argument.len()).sum::<usize>() <= input.len());
    let (mut consumed, mut arrived, mut seen, mut needed) = (0, 0, 0, 1);
    let mut arguments = Vec::new();
    let found = loop {
        while arrived - consumed < needed && arrived < input.len() {
            arrived = (arrived + 1 + random.below(24)).min(input.len());
        }
        match parse(&input[consumed..arrived], caps, &mut arguments) {
            Err(why) => break Err(why),
            Ok(Parsed::NeedsBytes(_)) if arrived == input.len() => break Ok(consumed),
            Ok(Parsed::NeedsBytes(bytes)) => {
                assert!(bytes > arrived - consumed);
                needed = bytes;
            }
            Ok(Parsed::Whole(bytes)) => {
                assert_eq!(arguments, expected[seen]);
                (consumed, seen, needed) = (consumed + bytes, seen + 1, 1);
            }
        }
    };
    assert_eq!(found, end, "{}", input.escape_ascii());
    assert_eq!(seen, expected.len(), "{}", input.escape_ascii());
}

/// The inputs of `tests/corpus/resp`: one for each rule of the parser.
fn corpus() -> Vec<Vec<u8>> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/resp");
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut inputs: Vec<_> = files.map(|file| std::fs::read(file).unwrap()).collect();
    inputs.sort();
    assert!(inputs.len() >= 20, "the corpus is there");
    inputs
}

/// 100,000 inputs, or ten million with `TESTS_LONG=1`. `TESTS_SEED=7` gives other ones.
#[test]
fn random_requests_in_random_pieces_are_read_as_in_one_piece() {
    let inputs = if std::env::var_os("TESTS_LONG").is_some() { 10_000_000 } else { 100_000 };
    let seed = std::env::var("TESTS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed);
    let corpus = corpus();
    for input in &corpus {
        arrives_in_pieces(&mut random, input, Caps::FULL);
        arrives_in_pieces(&mut random, input, Caps::BEFORE_AUTH);
    }
    let mut bytes = Vec::new();
    for number in 0..inputs {
        bytes.clear();
        if number % 4 == 0 {
            bytes.extend_from_slice(&corpus[random.below(corpus.len())]);
        }
        let sent: Vec<_> = (0..random.below(4)).map(|_| valid(&mut random, &mut bytes)).collect();
        let mutations = random.below(4);
        if mutations == 0 && number % 4 != 0 {
            let mut requests = Vec::new();
            assert_eq!(parse_all(&bytes, Caps::FULL, &mut requests), Ok(bytes.len()));
            assert_eq!(requests, sent);
        }
        (0..mutations).for_each(|_| mutate(&mut random, &mut bytes));
        // Copies of copies must not make the inputs grow without end.
        bytes.truncate(4_096);
        let caps = if random.below(8) == 0 { Caps::BEFORE_AUTH } else { Caps::FULL };
        arrives_in_pieces(&mut random, &bytes, caps);
    }
}
