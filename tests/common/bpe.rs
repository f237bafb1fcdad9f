//! The encoding rule of the eval program, written plainly. Tests and fuzz targets include this file by `#[path]`.

/// A vocabulary: each token's bytes and score.
pub type Entries = Vec<(Vec<u8>, f32)>;

/// Encodes a text, searching all adjacent pairs before every merge.
pub fn oracle(entries: &Entries, max_token_length: usize, text: &[u8]) -> Vec<u32> {
    pieces(text)
        .iter()
        .flat_map(|piece| oracle_piece(entries, max_token_length, piece))
        .collect()
}

fn pieces(text: &[u8]) -> Vec<Vec<u8>> {
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    for &byte in text {
        match pieces.last_mut() {
            Some(piece) if !byte.is_ascii_digit() && !piece[0].is_ascii_digit() => piece.push(byte),
            Some(piece) if byte.is_ascii_digit() && piece[0].is_ascii_digit() && piece.len() < 3 => piece.push(byte),
            _ => pieces.push(vec![byte]),
        }
    }
    pieces
}

fn oracle_piece(entries: &Entries, max_token_length: usize, piece: &[u8]) -> Vec<u32> {
    let ordinary = |bytes: &[u8]| entries.iter().position(|(b, score)| b == bytes && *score > -1e29);
    let any = |bytes: &[u8]| entries.iter().position(|(b, _)| b == bytes);
    let mut parts: Vec<Vec<u8>> = piece.iter().map(|&byte| vec![byte]).collect();
    loop {
        let pairs = parts.windows(2).map(|pair| pair.concat()).enumerate();
        let short = pairs.filter(|(_, bytes)| bytes.len() <= max_token_length);
        let Some((_, at)) = short.filter_map(|(at, bytes)| Some((ordinary(&bytes)?, at))).min() else {
            break;
        };
        let right = parts.remove(at + 1);
        parts[at].extend(right);
    }
    let id = |part: &Vec<u8>| ordinary(part).or(any(part)).unwrap_or(0) as u32;
    parts.iter().map(id).collect()
}
