// norm_route_cluster4: see norm_route_cluster.h. Two blocks fit a multiprocessor.
#include "norm_route_cluster.h"

static_assert(NORM_ROUTE_CLUSTER4_MOST_EXPERTS == NORM_ROUTE_CLUSTER4_THREADS / WAVE * NORM_ROUTE_CLUSTER4_CLUSTER,
              "a wave an expert");

NORM_ROUTE(norm_route_cluster4, NORM_ROUTE_CLUSTER4_THREADS, 2, NORM_ROUTE_CLUSTER4_CLUSTER)
