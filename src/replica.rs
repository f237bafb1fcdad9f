//! One copy of the model on one device group.
