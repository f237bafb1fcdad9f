//! The C ABI: structs, exported functions, the panic and NULL guard, the last error.
