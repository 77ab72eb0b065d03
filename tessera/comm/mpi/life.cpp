#include "tessera/comm/mpi/life.h"

#include <mpi.h>

#include "tessera/comm/mpi/check.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

// Open MPI's constants are casts of this kind.
// NOLINTBEGIN(bugprone-casting-through-void)
namespace tessera::comm::mpi {
namespace {

bool has_ended() {
  int ended = 0;
  MPI_Finalized(&ended);
  return ended != 0;
}

void check_level(int provided, const char* who) {
  TS_CHECK_CONFIG(provided >= MPI_THREAD_SERIALIZED, who,
                  " gave MPI's thread level ", provided,
                  ", but a progress thread of Tessera makes calls beside the "
                  "program: MPI_THREAD_SERIALIZED (",
                  MPI_THREAD_SERIALIZED,
                  ") is needed, and MPI_THREAD_MULTIPLE where the program "
                  "itself uses MPI meanwhile. Ask MPI_Init_thread for it, or "
                  "leave the start of MPI to Tessera.");
}

}  // namespace

std::string library_name() {
#if defined(OMPI_MAJOR_VERSION)
  return c10::str("Open MPI ", OMPI_MAJOR_VERSION, ".", OMPI_MINOR_VERSION, ".",
                  OMPI_RELEASE_VERSION);
#elif defined(MPICH_VERSION)
  return "MPICH " MPICH_VERSION;
#else
  return c10::str("MPI ", MPI_VERSION, ".", MPI_SUBVERSION);
#endif
}

World start() {
  int there = 0;
  int level = 0;
  TS_CHECK(!has_ended(),
           "MPI has ended in this process and cannot start again.");
  MPI_Initialized(&there);
  if (there) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    check_level(level, "the program's MPI_Init");
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level),
          "MPI_Init_thread");
    // An error of MPI_Testall belongs to one of these, by the implementation.
    for (const MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF}) {
      check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN),
            "MPI_Comm_set_errhandler");
    }
    check_level(level, library_name().c_str());
  }
  int rank = 0;
  int size = 1;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  World world{.rank = rank, .size = size, .started_here = there == 0};
  int* bound = nullptr;
  int is_set = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB,
                          static_cast<void*>(&bound), &is_set),
        "MPI_Comm_get_attr");
  if (is_set != 0) world.largest_tag = *bound;
  return world;
}

void nudge() {
  if (has_ended()) return;
  int flag = 0;
  check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &flag,
                   MPI_STATUS_IGNORE),
        "MPI_Iprobe");
}

void stop() {
  if (has_ended()) return;
  const int code = MPI_Finalize();
  if (code != MPI_SUCCESS) {
    log::warning("MPI was not ended: MPI_Finalize gave ", code);
  }
}

}  // namespace tessera::comm::mpi
// NOLINTEND(bugprone-casting-through-void)
