//! The eval program's byte-level BPE, in near-linear time.
//!
//! The program searches all adjacent pairs before every merge, which is quadratic in the length of a piece, and a piece
//! is all text between two digits. Here the pairs are in a priority queue ordered by (id, position), the parts form a
//! doubly linked list, and a merge changes only the two pairs beside it. This is the method of SentencePiece's
//! `bpe_model.cc` and of llama.cpp's `llama-vocab.cpp`, with the vocabulary id as the priority. A queued pair whose
//! parts have changed since is recognized when it is popped, and dropped.
//!
//! Two adjacent parts can be merged if their concatenated *bytes* are an entry. Each part keeps a polynomial hash of
//! its bytes, from which the hash of a concatenation follows in constant time, so that long parts are not hashed again.
//! On a hit the bytes are compared, so a hash collision costs time and never changes the result.
//!
//! A piece of `n` bytes takes `n` lookups to start, two more for each of at most `n - 1` merges, and `O(n log n)` in
//! the queue. For o200k_harmony the tables take 6.4 MB: entries 1.4, offsets 0.8, hash table 4.2.

use crate::error::{Error, Result};
use crate::file_kind::{self, GivenAs};
use crate::memory::{self, Purpose};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Stands for no entry, no merge, or no neighbour.
const NONE: u32 = u32::MAX;
/// Only entries with a higher score are results of merges; special tokens have a lower one. *Ordinary* entries are
/// those with a higher score.
const SPECIAL_SCORE: f32 = -1e29;
/// Digits are encoded in chunks of this many, from the left.
const DIGIT_CHUNK: usize = 3;

/// Whether an entry with this score is the result of a merge, and no special token.
pub fn is_ordinary(score: f32) -> bool {
    score > SPECIAL_SCORE
}

/// A vocabulary that encodes and decodes. Threads may share it.
pub struct Tokenizer {
    /// The bytes of all entries, concatenated.
    bytes: Vec<u8>,
    /// Entry `id` is `bytes[offsets[id]..offsets[id + 1]]`; `[vocab_size + 1]`.
    offsets: Vec<u32>,
    /// See [`Tokenizer::max_token_length`].
    max_token_length: usize,
    /// The id of each single byte, 0 if it has none.
    byte_ids: [u32; 256],
    /// The entries that are results of merges.
    merges: MergeTable,
}

/// Of all that encoding and decoding depend on.
impl Hash for Tokenizer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.bytes, &self.offsets).hash(state);
        (self.max_token_length, self.byte_ids).hash(state);
        self.merges.buckets.iter().for_each(|bucket| bucket.id.hash(state));
    }
}

impl Tokenizer {
    /// Makes a tokenizer of `(bytes, score)` entries; an entry's id is its index.
    ///
    /// Of several entries with the same bytes an ordinary one is preferred to a special one, then the lowest id.
    /// Fails if the number of entries or of bytes does not fit in 32 bits, or if there is no memory.
    pub fn new<B: AsRef<[u8]>>(entries: impl IntoIterator<Item = (B, f32)>, max_token_length: usize) -> Result<Self> {
        let mut tokenizer = Self {
            bytes: Vec::new(),
            offsets: Vec::new(),
            max_token_length,
            byte_ids: [0; 256],
            merges: MergeTable::default(),
        };
        memory::push(&mut tokenizer.offsets, 0, Purpose::Vocabulary)?;
        let mut ordinary = Vec::new();
        let mut longest = 0;
        for (entry, score) in entries {
            let entry = entry.as_ref();
            tokenizer.append(entry)?;
            memory::push(&mut ordinary, is_ordinary(score), Purpose::Vocabulary)?;
            if is_ordinary(score) {
                longest = longest.max(entry.len());
            }
        }
        tokenizer.max_token_length = max_token_length.min(longest);
        tokenizer.byte_ids = tokenizer.index_bytes(&ordinary);
        tokenizer.merges = tokenizer.index_merges(&ordinary)?;
        Ok(tokenizer)
    }

    /// Reads the file `tokenizer.bin`, in the format that [`Tokenizer::parse`] describes.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let file = VocabularyFile::read(path.as_ref())?;
        let (max_token_length, entries) = file.entries()?;
        Self::new(entries, max_token_length)
    }

    /// Parses the contents of `tokenizer.bin`: int32 max token length, then for each id float32 score, int32 length and
    /// that many bytes, until the data ends. The number of entries is not stored, so the caller compares
    /// [`Tokenizer::vocab_size`] with the model's.
    pub fn parse(data: &[u8]) -> Result<Self> {
        let (max_token_length, entries) = read_entries(data, "tokenizer.bin")?;
        Self::new(entries, max_token_length)
    }

    /// Number of entries in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The most bytes of a merge's result: the limit given with the vocabulary, or the length of its longest ordinary
    /// entry if that is less. The eval program allocates this many bytes of a prompt for each of its positions.
    pub fn max_token_length(&self) -> usize {
        self.max_token_length
    }

    /// The tokens of `text`, at most `max_tokens` of them, by the program's rule.
    ///
    /// Each run of ASCII digits is cut into pieces of three from the left, and each longest run of other bytes is one
    /// piece. A piece starts as one part a byte. Of all adjacent parts whose concatenation is an ordinary entry, those
    /// with the lowest id are merged, leftmost first, until there are none. A byte that is left without an entry
    /// becomes token 0. The text need not be UTF-8.
    ///
    /// Fails if there is no memory.
    ///
    /// # Panics
    ///
    /// On a text of 4 GiB or more.
    pub fn encode(&self, text: &[u8], max_tokens: usize) -> Result<Vec<u32>> {
        assert!(text.len() < NONE as usize, "a text of {} bytes", text.len());
        let mut tokens = Vec::new();
        let mut merger = Merger::new(&self.merges);
        let mut rest = text;
        while !rest.is_empty() && tokens.len() < max_tokens {
            let (piece, behind) = rest.split_at(first_piece_bytes(rest));
            merger.encode_piece(self, piece, &mut tokens)?;
            rest = behind;
        }
        tokens.truncate(max_tokens);
        Ok(tokens)
    }

    /// The bytes to print for a token: its entry, except that an entry written `<0xXX>` is that byte. Empty for an id
    /// outside the vocabulary.
    pub fn decode_piece(&self, id: u32) -> &[u8] {
        if id as usize >= self.vocab_size() {
            return &[];
        }
        let piece = self.entry(id);
        named_byte(piece).map_or(piece, |byte| std::slice::from_ref(&BYTES[usize::from(byte)]))
    }

    /// Whether every text without a NUL byte is what its tokens are decoded to: no byte becomes token 0 for want of an
    /// entry.
    pub fn has_all_bytes(&self) -> bool {
        (1..=u8::MAX).all(|byte| self.entry(self.byte_ids[usize::from(byte)]) == [byte])
    }

    fn append(&mut self, entry: &[u8]) -> Result<()> {
        memory::append(&mut self.bytes, entry, Purpose::Vocabulary)?;
        let end = u32::try_from(self.bytes.len()).map_err(|_| Error::Overflow("the vocabulary's text"))?;
        memory::push(&mut self.offsets, end, Purpose::Vocabulary)?;
        // Ids must stay below NONE, and there is one more offset than ids.
        if self.vocab_size() >= NONE as usize {
            return Err(Error::Overflow("the vocabulary's size"));
        }
        Ok(())
    }

    fn entry(&self, id: u32) -> &[u8] {
        let id = id as usize;
        &self.bytes[self.offsets[id] as usize..self.offsets[id + 1] as usize]
    }

    fn ids(&self) -> impl Iterator<Item = u32> + use<> {
        0..self.vocab_size() as u32
    }

    /// The id of every single byte. Special entries count too: the program looks up the parts that are left after
    /// merging without looking at scores. For longer parts that makes no difference, since only ordinary entries are
    /// merged.
    fn index_bytes(&self, ordinary: &[bool]) -> [u32; 256] {
        let mut best = [(true, NONE); 256];
        for id in self.ids() {
            if let &[byte] = self.entry(id) {
                let least = &mut best[usize::from(byte)];
                *least = (*least).min((!ordinary[id as usize], id));
            }
        }
        best.map(|(_, id)| if id == NONE { 0 } else { id })
    }

    fn index_merges(&self, ordinary: &[bool]) -> Result<MergeTable> {
        let lengths = 2..=self.max_token_length;
        let ids = || {
            self.ids()
                .filter(|&id| ordinary[id as usize] && lengths.contains(&self.entry(id).len()))
        };
        let longest = ids().map(|id| self.entry(id).len()).max().unwrap_or(0);
        let mut merges = MergeTable::new(ids().count(), longest)?;
        for id in ids() {
            merges.insert(self, id);
        }
        Ok(merges)
    }
}

/// Length of the first piece of `text`.
fn first_piece_bytes(text: &[u8]) -> usize {
    let digits = text.iter().take(DIGIT_CHUNK).take_while(|b| b.is_ascii_digit()).count();
    if digits > 0 {
        return digits;
    }
    text.iter().position(u8::is_ascii_digit).unwrap_or(text.len())
}

/// Every byte, so that a slice of one can be returned.
static BYTES: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut i = 0;
    while i < bytes.len() {
        bytes[i] = i as u8;
        i += 1;
    }
    bytes
};

/// The byte that an entry like `<0x0A>` stands for.
pub fn named_byte(piece: &[u8]) -> Option<u8> {
    let &[b'<', b'0', b'x', high, low, b'>'] = piece else {
        return None;
    };
    let digit = |c: u8| char::from(c).to_digit(16);
    Some((digit(high)? * 16 + digit(low)?) as u8)
}

/// The most bytes accepted of a vocabulary's file; o200k_harmony's `tokenizer.bin` has 3 MB, its `tokenizer.json` 28.
const MOST_FILE_BYTES: u64 = 1 << 28;

/// The contents of a `tokenizer.bin`.
pub struct VocabularyFile {
    path: PathBuf,
    data: Vec<u8>,
}

impl VocabularyFile {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self> {
        Ok(Self {
            path: path.into(),
            data: read_bytes(path, File::open(path), GivenAs::Vocabulary)?,
        })
    }

    /// The max token length and the entries.
    pub fn entries(&self) -> Result<(usize, Vec<Entry<'_>>)> {
        let entries = read_entries(&self.data, &self.path.display().to_string());
        entries.map_err(|error| file_kind::explain(&self.path, error, GivenAs::Vocabulary))
    }
}

/// The contents of a file with a vocabulary that has been opened, given as this.
pub fn read_bytes(path: &Path, file: std::io::Result<File>, given_as: GivenAs) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    let file = file.map_err(|source| Error::io(path, source))?;
    file.take(MOST_FILE_BYTES + 1)
        .read_to_end(&mut data)
        .map_err(|source| file_kind::explain(path, Error::io(path, source), given_as))?;
    if data.len() as u64 > MOST_FILE_BYTES {
        let why = format!("it has more than {MOST_FILE_BYTES} bytes, which no vocabulary has");
        let error = Error::format(path.display().to_string(), why);
        return Err(file_kind::explain(path, error, given_as));
    }
    Ok(data)
}

/// An entry of `tokenizer.bin`: its bytes and its score.
pub type Entry<'a> = (&'a [u8], f32);

/// The max token length and the entries in the contents of `tokenizer.bin`, in the format that [`Tokenizer::parse`]
/// describes; `what` names the data in errors.
pub fn read_entries<'a>(data: &'a [u8], what: &str) -> Result<(usize, Vec<Entry<'a>>)> {
    let mut reader = Reader { what, data, at: 0 };
    let max_token_length = reader.length("max token length")?;
    let mut entries = Vec::new();
    while !reader.is_at_end() {
        let score = f32::from_le_bytes(reader.four()?);
        let length = reader.length("token length")?;
        memory::push(&mut entries, (reader.take(length)?, score), Purpose::Vocabulary)?;
    }
    if entries.is_empty() {
        return Err(Error::format(what, "it holds no entry; export the tokenizer again"));
    }
    Ok((max_token_length, entries))
}

/// Reads the contents of `tokenizer.bin` from front to back.
struct Reader<'a, 'w> {
    what: &'w str,
    data: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a, '_> {
    fn is_at_end(&self) -> bool {
        self.at == self.data.len()
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8]> {
        // `at` is within memory and `bytes` at most an i32, so the sum cannot overflow.
        let end = self.at + bytes;
        let taken = self.data.get(self.at..end).ok_or_else(|| Error::Length {
            what: self.what.into(),
            expected_bytes: end as u64,
            actual_bytes: self.data.len() as u64,
        })?;
        self.at = end;
        Ok(taken)
    }

    fn four(&mut self) -> Result<[u8; 4]> {
        let taken = self.take(4)?;
        Ok([taken[0], taken[1], taken[2], taken[3]])
    }

    fn length(&mut self, field: &str) -> Result<usize> {
        let at = self.at;
        let value = i32::from_le_bytes(self.four()?);
        usize::try_from(value).map_err(|_| {
            let why = format!("{field} is {value} at byte {at}; it cannot be negative");
            Error::format(self.what, why)
        })
    }
}

/// A hash table of the ordinary entries of two bytes and more, keyed by their bytes: open addressing with linear
/// probing.
#[derive(Default)]
struct MergeTable {
    /// Its length is a power of two. At least half of the buckets are free, so every search ends.
    buckets: Vec<Bucket>,
    /// `powers[k]` is `HASH_BASE` to the power of `k`; `[longest + 1]`.
    powers: Vec<u64>,
    /// Length in bytes of the longest entry.
    longest: usize,
}

#[derive(Clone, Copy)]
struct Bucket {
    /// The high bits of the hash. If they differ, the bytes need not be compared.
    tag: u32,
    /// The entry, or `NONE`.
    id: u32,
}

/// Base of the polynomial hash, modulo 2^64. It is odd, so that no power of it becomes 0.
const HASH_BASE: u64 = 0x9E37_79B9_7F4A_7C15;

/// Hash of one byte. The 1 makes leading NUL bytes change the hash.
fn byte_hash(byte: u8) -> u64 {
    u64::from(byte) + 1
}

/// Mixes a polynomial hash, since its low bits depend only on the low bits of the bytes.
fn spread(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    hash ^ (hash >> 32)
}

impl MergeTable {
    fn new(entries: usize, longest: usize) -> Result<Self> {
        let powers = std::iter::successors(Some(1_u64), |p| Some(p.wrapping_mul(HASH_BASE)));
        let free = Bucket { tag: 0, id: NONE };
        Ok(Self {
            buckets: memory::filled(free, (2 * entries).next_power_of_two(), Purpose::Vocabulary)?,
            powers: memory::collect(powers.take(longest + 1), Purpose::Vocabulary)?,
            longest,
        })
    }

    /// The hash of a concatenation from the hashes of both sides. `right_bytes` is at most `longest`.
    fn join_hash(&self, left: u64, right: u64, right_bytes: usize) -> u64 {
        left.wrapping_mul(self.powers[right_bytes]).wrapping_add(right)
    }

    /// Inserts an entry, unless the table has one with the same bytes.
    fn insert(&mut self, vocabulary: &Tokenizer, id: u32) {
        let bytes = vocabulary.entry(id);
        let hash = bytes.iter().fold(0, |hash, &b| self.join_hash(hash, byte_hash(b), 1));
        let (bucket, tag) = self.search(vocabulary, hash, bytes);
        if self.buckets[bucket].id == NONE {
            self.buckets[bucket] = Bucket { tag, id };
        }
    }

    /// The entry with these bytes and this hash, or `NONE`.
    fn find(&self, vocabulary: &Tokenizer, hash: u64, bytes: &[u8]) -> u32 {
        let (bucket, _) = self.search(vocabulary, hash, bytes);
        self.buckets[bucket].id
    }

    /// The bucket that holds these bytes, or the free bucket where they would be inserted; and their tag.
    fn search(&self, vocabulary: &Tokenizer, hash: u64, bytes: &[u8]) -> (usize, u32) {
        let hash = spread(hash);
        let (mask, tag) = (self.buckets.len() - 1, (hash >> 32) as u32);
        let mut at = hash as usize & mask;
        loop {
            let bucket = self.buckets[at];
            if bucket.id == NONE || bucket.tag == tag && vocabulary.entry(bucket.id) == bytes {
                return (at, tag);
            }
            at = (at + 1) & mask;
        }
    }
}

/// A part of a piece: consecutive bytes. Its index in `Merger::parts` is its first byte.
#[derive(Clone, Copy)]
struct Symbol {
    /// Hash of the part's bytes.
    hash: u64,
    /// End of the part's bytes, which is the index of its right neighbour.
    end: u32,
    /// Index of the left neighbour, or `NONE`.
    previous: u32,
    /// The part's token.
    token: u32,
    /// The token of this part merged with its right neighbour, or `NONE` if that is no entry. Also `NONE` after this
    /// part has been merged into its left neighbour.
    merged: u32,
}

/// Encodes pieces, one after the other, and reuses its memory.
struct Merger<'a> {
    merges: &'a MergeTable,
    /// `[bytes of the piece]`; elements inside a longer part are not used.
    parts: Vec<Symbol>,
    /// Pairs that can be merged, as `(id, index of the left part)`, the lowest first.
    queue: BinaryHeap<Reverse<(u32, u32)>>,
}

impl<'a> Merger<'a> {
    fn new(merges: &'a MergeTable) -> Self {
        Self {
            merges,
            parts: Vec::new(),
            queue: BinaryHeap::new(),
        }
    }

    fn encode_piece(&mut self, vocabulary: &Tokenizer, piece: &[u8], tokens: &mut Vec<u32>) -> Result<()> {
        self.split(vocabulary, piece)?;
        while let Some(Reverse((token, left))) = self.queue.pop() {
            // A part only grows, so it never has the same result of a merge twice: if equal, the pair is unchanged.
            if self.parts[left as usize].merged == token {
                self.merge(vocabulary, piece, left as usize)?;
            }
        }
        let mut start = 0;
        while let Some(part) = self.parts.get(start) {
            memory::push(tokens, part.token, Purpose::Requests)?;
            start = part.end as usize;
        }
        Ok(())
    }

    /// Makes one part of each byte, and queues the pairs that can be merged.
    fn split(&mut self, vocabulary: &Tokenizer, piece: &[u8]) -> Result<()> {
        self.parts.clear();
        memory::reserve(&mut self.parts, piece.len(), Purpose::Requests)?;
        self.parts.extend((0..).zip(piece).map(|(start, &byte)| Symbol {
            hash: byte_hash(byte),
            end: start + 1,
            previous: start.wrapping_sub(1), // NONE before the first
            token: vocabulary.byte_ids[usize::from(byte)],
            merged: NONE,
        }));
        for start in 0..piece.len() {
            self.propose(vocabulary, piece, start)?;
        }
        Ok(())
    }

    /// Merges the part at `left` with its right neighbour, and looks up the two pairs that this changes.
    fn merge(&mut self, vocabulary: &Tokenizer, piece: &[u8], left: usize) -> Result<()> {
        let right = self.parts[left].end as usize;
        let end = self.parts[right].end;
        self.parts[left] = Symbol {
            hash: self.joined_hash(left),
            end,
            token: self.parts[left].merged,
            ..self.parts[left]
        };
        self.parts[right].merged = NONE;
        if let Some(next) = self.parts.get_mut(end as usize) {
            next.previous = left as u32;
        }
        self.propose(vocabulary, piece, left)?;
        match self.parts[left].previous {
            NONE => Ok(()),
            previous => self.propose(vocabulary, piece, previous as usize),
        }
    }

    /// Looks up the pair of the part at `left` and its right neighbour, and queues it if it can be merged.
    fn propose(&mut self, vocabulary: &Tokenizer, piece: &[u8], left: usize) -> Result<()> {
        let merged = self.lookup(vocabulary, piece, left);
        self.parts[left].merged = merged;
        if merged != NONE {
            let more = self.queue.try_reserve(1);
            more.map_err(|_| memory::lacking::<[u32; 2]>(self.queue.len() + 1, Purpose::Requests))?;
            self.queue.push(Reverse((merged, left as u32)));
        }
        Ok(())
    }

    fn lookup(&self, vocabulary: &Tokenizer, piece: &[u8], left: usize) -> u32 {
        let Some(right) = self.parts.get(self.parts[left].end as usize) else {
            return NONE;
        };
        let pair = &piece[left..right.end as usize];
        if pair.len() > self.merges.longest {
            return NONE;
        }
        self.merges.find(vocabulary, self.joined_hash(left), pair)
    }

    /// The hash of the part at `left` concatenated with its right neighbour.
    fn joined_hash(&self, left: usize) -> u64 {
        let left = self.parts[left];
        let right = self.parts[left.end as usize];
        self.merges
            .join_hash(left.hash, right.hash, (right.end - left.end) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPECIAL: f32 = -1e30;

    fn tokenizer(entries: &[(&str, f32)], max_token_length: usize) -> Tokenizer {
        Tokenizer::new(entries.iter().copied(), max_token_length).unwrap()
    }

    fn entry(score: f32, length: i32, bytes: &[u8]) -> Vec<u8> {
        [&score.to_le_bytes()[..], &length.to_le_bytes(), bytes].concat()
    }

    #[test]
    fn the_lowest_id_is_merged_first_and_the_leftmost_on_a_tie() {
        let t = tokenizer(
            &[("a", 0.), ("b", 0.), ("c", 0.), ("bc", 0.), ("ab", 0.), ("aa", 0.)],
            8,
        );
        assert_eq!(t.encode(b"abc", 9).unwrap(), [0, 3]);
        assert_eq!(t.encode(b"aaa", 9).unwrap(), [5, 0]);
    }

    #[test]
    fn digits_are_cut_in_threes_from_the_left_and_other_bytes_are_not_cut() {
        let t = tokenizer(
            &[
                ("1", 0.),
                ("11", 0.),
                ("111", 0.),
                ("1111", 0.),
                ("a1", 0.),
                ("a a", 0.),
            ],
            8,
        );
        assert_eq!(t.encode(b"1111111", 9).unwrap(), [2, 2, 0]);
        assert_eq!(t.encode(b"a11a", 9).unwrap(), [0, 1, 0]);
    }

    #[test]
    fn parts_are_bytes_and_need_no_entry_of_their_own() {
        let t = tokenizer(&[("x", 0.), ("yz", 0.)], 8);
        assert_eq!(t.encode(b"xyzy", 9).unwrap(), [0, 1, 0]);
    }

    #[test]
    fn special_entries_never_come_out_of_a_merge() {
        let t = tokenizer(
            &[("a", 0.), ("b", SPECIAL), ("ab", SPECIAL), ("bb", f32::NAN), ("ba", 0.)],
            8,
        );
        assert_eq!(t.encode(b"ab", 9).unwrap(), [0, 1]);
        assert_eq!(t.encode(b"bb", 9).unwrap(), [1, 1]);
        assert_eq!(t.encode(b"ba", 9).unwrap(), [4]);
    }

    #[test]
    fn of_equal_entries_the_first_ordinary_one_counts() {
        let same = [
            ("a", SPECIAL),
            ("a", 0.),
            ("a", 0.),
            ("aa", SPECIAL),
            ("aa", 0.),
            ("aa", 0.),
        ];
        assert_eq!(tokenizer(&same, 8).encode(b"aaa", 9).unwrap(), [4, 1]);
    }

    #[test]
    fn merges_respect_the_longest_length() {
        let entries = [("a", 0.), ("aa", 0.), ("aaaa", 0.)];
        assert_eq!(tokenizer(&entries, 4).encode(b"aaaa", 9).unwrap(), [2]);
        assert_eq!(tokenizer(&entries, 3).encode(b"aaaa", 9).unwrap(), [1, 1]);
        assert_eq!(tokenizer(&entries, 0).encode(b"aa", 9).unwrap(), [0, 0]);
        assert_eq!(tokenizer(&entries, usize::MAX).encode(b"aaaa", 9).unwrap(), [2]);
    }

    #[test]
    fn the_limit_cuts_the_tokens_behind_the_merges() {
        let t = tokenizer(&[("a", 0.), ("aa", 0.)], 2);
        assert_eq!(t.encode(b"aaaaa", 2).unwrap(), [1, 1]);
        assert_eq!(t.encode(b"aaaaa", 0).unwrap(), [0; 0]);
        assert_eq!(t.encode(b"", 9).unwrap(), [0; 0]);
    }

    #[test]
    fn a_vocabulary_without_entries_encodes_to_zeros() {
        let t = tokenizer(&[], 8);
        assert_eq!(t.encode(b"a\xFF1", 9).unwrap(), [0, 0, 0]);
        assert_eq!(t.decode_piece(0), b"");
    }

    #[test]
    fn named_bytes_are_decoded_and_nothing_else() {
        let t = tokenizer(
            &[("<0x00>", 0.), ("<0xaF>", 0.), ("<0xG0>", 0.), ("<0x00", 0.), ("", 0.)],
            8,
        );
        assert_eq!(t.decode_piece(0), [0]);
        assert_eq!(t.decode_piece(1), [0xAF]);
        assert_eq!(t.decode_piece(2), b"<0xG0>");
        assert_eq!(t.decode_piece(3), b"<0x00");
        assert_eq!(t.decode_piece(4), b"");
        assert_eq!(t.decode_piece(5), b"");
        assert_eq!(t.decode_piece(u32::MAX), b"");
    }

    #[test]
    fn a_file_gives_back_what_was_written() {
        let file = [
            7_i32.to_le_bytes().to_vec(),
            entry(0., 1, b"a"),
            entry(SPECIAL, 2, b"\0b"),
        ]
        .concat();
        let t = Tokenizer::parse(&file).unwrap();
        assert_eq!(t.vocab_size(), 2);
        assert_eq!(t.decode_piece(1), b"\0b");
    }

    #[test]
    fn the_longest_length_is_at_most_that_of_the_longest_ordinary_entry() {
        let entries = [("a", 0.), ("aaa", 0.), ("special", SPECIAL), ("aa", 0.)];
        for (given, taken) in [(0, 0), (2, 2), (3, 3), (4, 3), (1 << 30, 3)] {
            assert_eq!(tokenizer(&entries, given).max_token_length(), taken);
        }
    }

    #[test]
    fn what_is_no_vocabulary_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.bin");
        let refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Tokenizer::read(&path).err().unwrap().to_string()
        };
        let json = refused(b"{\n  \"version\": \"1.0\",\n  \"truncation\": null}");
        assert!(
            json.contains("it is a JSON file; a vocabulary is a tokenizer.bin"),
            "{json}"
        );
        let pointer = refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:1");
        assert!(pointer.contains("git lfs pull"), "{pointer}");
        let directory = Tokenizer::read(dir.path()).err().unwrap().to_string();
        assert!(directory.contains("it is a directory"), "{directory}");
    }

    #[test]
    fn a_file_cut_anywhere_inside_an_entry_is_refused() {
        let header = 7_i32.to_le_bytes().to_vec();
        let file = [header, entry(0., 3, b"abc"), entry(0., 2, b"de")].concat();
        let whole = [4 + 11, file.len()];
        for bytes in (0..file.len()).filter(|bytes| !whole.contains(bytes)) {
            let error = Tokenizer::parse(&file[..bytes]).err().unwrap();
            // Four bytes are a complete header without entries.
            assert_eq!(matches!(error, Error::Format { .. }), bytes == 4, "{bytes}: {error}");
            assert!(matches!(error, Error::Format { .. } | Error::Length { .. }), "{error}");
        }
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        let max = 7_i32.to_le_bytes().to_vec();
        let negative = [max.clone(), entry(0., -1, b"a")].concat();
        let huge = [max, entry(0., i32::MAX, b"a")].concat();
        let error = |file: &[u8]| Tokenizer::parse(file).err().unwrap();
        assert!(matches!(error(&negative), Error::Format { .. }));
        assert!(matches!(
            error(&huge),
            Error::Length {
                expected_bytes: 0x8000_000B,
                ..
            }
        ));
        assert!(matches!(error(&(-7_i32).to_le_bytes()), Error::Format { .. }));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Tokenizer::read("no/such/tokenizer.bin").err().unwrap();
        assert!(error.to_string().starts_with("no/such/tokenizer.bin: "), "{error}");
    }
}
