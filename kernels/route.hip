// route: chooses experts and their shares for ROUTE_ROWS rows per block. So the router's matrix (184 KB with 32 experts
// of 2880, 737 KB with 128) is read once for all of them, and the products are not limited by the rate at which an SM
// reads L2.
//
// Grid: rows of the bucket / ROUTE_ROWS, rounded up. At most MAX_EXPERTS experts, MAX_K of them per token.
#include "route.h"

enum { THREADS = ROUTE_THREADS };

KERNEL(route, RouteArgs, THREADS, 1, 2) {
  SHARED StagedRows stage;
  SHARED Routing<ROUTE_ROWS> s;
  let_successor_start();
  after_predecessor();
  const int first = BID * ROUTE_ROWS, left = a.step.header->rows - first;
  if (left <= 0) return;
  route_rows<THREADS>(a, a.t32 + (i64)first * a.hidden, first, left < ROUTE_ROWS ? left : ROUTE_ROWS, stage, s);
}
