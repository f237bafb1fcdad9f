/* A program that calls MPI itself, or looks at what the library has done with it. Called as the others, and with
 *
 *     HOW OUT
 *
 * HOW: single, funneled and serialized initialize MPI so; not leaves that to the library; die does as well, and rank 1
 * is killed between warm_up and inference; so does survive, whose first inference may fail. The answers go to
 * OUT.RANK. */

#define _POSIX_C_SOURCE 200809L
#include "host.h"

#include <mpi.h>
#include <signal.h>

static void initialize(const char *how) {
  int provided;
  if (strcmp(how, "single") == 0) {
    MPI_Init(NULL, NULL);
  } else if (strcmp(how, "funneled") == 0) {
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
  } else if (strcmp(how, "serialized") == 0) {
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
  }
}

static int launched(void) {
  const char *open_mpi = getenv("OMPI_COMM_WORLD_SIZE"), *mpich = getenv("PMI_SIZE");
  const char *size = open_mpi != NULL ? open_mpi : mpich;
  return size != NULL && atoi(size) > 1;
}

static void write_answers(struct host *h, const char *out, int rank) {
  char path[4096];
  snprintf(path, sizeof path, "%s.%d", out, rank);
  FILE *file = fopen(path, "w");
  host_require(file != NULL, "the file of answers opens");
  for (int request = 0; request < getp_requests_count(h->requests); request++) {
    size_t length;
    const int *tokens = getp_requests_tokens(h->requests, request, &length);
    for (size_t i = 0; i < length; i++) fprintf(file, "%d ", tokens[i]);
    fputc('\n', file);
  }
  host_require(fclose(file) == 0, "the file of answers is written");
}

int main(int argc, char **argv) {
  int is_initialized, is_finalized, rank = 0;
  host_log = stderr;
  if (argc != 6) return 2;
  const char *how = argv[4];
  const int survives = strcmp(how, "survive") == 0;
  const int leaves_it = strcmp(how, "not") == 0 || strcmp(how, "die") == 0 || survives;
  initialize(how);
  /* MPI outlives finish: the second time finds it as the first has left it. */
  for (int time = 0; time < 2; time++) {
    struct host h = host_open(argv, GETP_OFF);
    host_warm_up(&h);
    MPI_Initialized(&is_initialized);
    host_require(is_initialized == (!leaves_it || launched()), "MPI is initialized where there are ranks");
    if (is_initialized) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (strcmp(how, "die") == 0 && rank == 1) raise(SIGKILL);
    const long long tokens = host_inference(&h);
    if (survives && time == 0 && tokens < 0) {
      fprintf(host_log, "told, rank %d: %s\n", rank, getp_last_error());
    } else {
      host_require(tokens > 0, "the requests are answered");
    }
    write_answers(&h, argv[5], rank);
    finish(getp_model_transformer(h.model), getp_tokenizer_get(h.tokenizer));
    host_close(&h);
    MPI_Finalized(&is_finalized);
    host_require(!is_finalized, "finish finalizes nothing");
  }
  if (!leaves_it) {
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
  }
  fprintf(host_log, "ok: %s, rank %d\n", how, rank);
  return 0;
}
