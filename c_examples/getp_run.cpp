// The drop-in: stands where an eval program keeps its own implementation of
// warm_up(), inference() and finish(), and leaves all three to libgetp.
//
// Put this file in place as getp-csrc/getp_run.cpp. run.cpp, getp_eval.cpp and
// the Makefile stay as they are; only the link line grows, behind the sources:
//
//     -L$GETP -lgetp -Wl,-rpath,$GETP        # $GETP: the folder of libgetp.so
//
// getp_eval.cpp declares the three functions with C++ linkage, and libgetp
// exports them under the names that such a declaration looks for.

#ifndef GETP_RUN
#define GETP_RUN

#include "getp_eval.cpp"

#endif  // GETP_RUN
