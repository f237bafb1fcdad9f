//! Checked view of the program's request buffers.
