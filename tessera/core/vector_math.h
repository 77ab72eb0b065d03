// MKL, by which LibTorch takes exp, cos and others on the CPU, chooses their
// code for the processor at the first call, and is not safe there: it stores
// the processor's kind, and then over it what it stands for. A second thread
// that reads in between computes by other code, and last bits differ
// (mkl_vml_serv_cpu_detect of the MKL in LibTorch 2.13; seen in up to one
// run in ten of two ranks that were threads).
#pragma once

namespace tessera {

// That choice is made when this returns: before threads of one process compute.
// Any thread; the first call alone does something.
void settle_vector_math();

}  // namespace tessera
