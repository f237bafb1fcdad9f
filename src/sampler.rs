//! The next token from a row of logits.
