//! Where the operations run.
