// Matrices that are updated whole, put together on every rank that has a piece
// of them: by an optimizer whose update is no sum over elements (Muon).
//
// Comm:    a unit's pieces travel together, padded to the largest: one
//          all_gather over the ranks along the axes that cut its matrices, for
//          each set of axes. With P bytes of pieces and N ranks a rank sends
//          (N-1) P.
// Memory:  what was gathered stays until free(); whole() makes one matrix of
//          it at a time.
// Threads: as comm::Group: one thread a rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/parallel/data/matrix_pieces.h"

namespace tessera::optim {
class Optimizer;
struct WholePiece;
}  // namespace tessera::optim

namespace tessera::parallel::data {

class WholeUpdates {
 public:
  struct Matrix {
    size_t parameter = 0;  // its number among those that are trained
    int64_t unit = 0;
    mesh::Layout layout;
  };
  // REQUIRES: the matrices of a unit in the same order on all of its ranks.
  WholeUpdates(const std::vector<Matrix>& matrices,
               const mesh::DeviceMesh& mesh, comm::Communicator& ranks,
               const at::TensorOptions& numbers);

  // `piece_of`: this rank's piece of a parameter.
  using PieceOf = std::function<at::Tensor(size_t parameter)>;
  void begin_gather(int64_t unit, const PieceOf& piece_of, comm::Mode mode);
  void await_gather(int64_t unit);
  void free(int64_t unit);

  // Whether others have pieces of it.
  bool gathers(size_t parameter) const { return cut_.contains(parameter); }
  // What a step of this optimizer, whose segments are these parameters, asks
  // for: the matrix and where this rank's piece lies in it, or the segment
  // itself where that is whole. REQUIRES: its unit's gather was awaited.
  optim::WholePiece whole_of(optim::Optimizer& optimizer,
                             size_t parameter) const;

 private:
  at::Tensor whole(size_t parameter) const;
  struct Piece {
    size_t parameter;
    MatrixPieces pieces;
    int64_t offset;  // in what a rank sends
  };
  // What one collective moves.
  struct Bundle {
    comm::Group* group = nullptr;
    std::vector<Piece> matrices = {};
    int64_t numel = 0;
    at::Tensor sent = {}, gathered = {};
    comm::Work work = {};
  };
  // Of whole(): which bundle of which unit, and which matrix of it.
  struct Place {
    int64_t unit;
    size_t bundle, matrix;
  };
  const Piece& at(const Place& place) const;

  const at::TensorOptions numbers_;
  std::map<int64_t, std::vector<Bundle>> units_;
  std::map<size_t, Place> cut_;  // by parameter
};

}  // namespace tessera::parallel::data
