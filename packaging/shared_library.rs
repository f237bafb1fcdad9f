//! Nothing of its own: linked with libgetp.rlib it is the shared library that is installed. See install.sh.

extern crate getp;
