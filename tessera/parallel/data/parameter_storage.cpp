#include "tessera/parallel/data/parameter_storage.h"

#include <ATen/ATen.h>

#include "tessera/core/memory_kind.h"

namespace tessera::parallel::data {

at::Tensor window_of(const at::Tensor& tensor) {
  return tensor.variable_data();
}

void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const auto size = static_cast<size_t>(bytes);
  TORCH_INTERNAL_ASSERT(storage.resizable());
  storage.set_data_ptr_noswap({nullptr, tensor.device()});
  storage.set_nbytes(0);  // should the next line throw
  if (size > 0) {
    storage.set_data_ptr_noswap(storage.allocator()->allocate(size));
  }
  storage.set_nbytes(size);
}

ParameterStorage::ParameterStorage(const Bundle& bundle, comm::Group& shards)
    : bundle_(bundle), group_(shards) {
  const at::NoGradGuard no_grad;
  lay_out();
}

void ParameterStorage::lay_out() {
  const MemoryScope scope(MemoryKind::kParameters);
  if (!bundle_.is_sharded()) {
    for (const auto& parameter : bundle_.parameters) {
      local_.push_back(window_of(parameter.tensor));
    }
    return;
  }
  const Cut& cut = bundle_.cut;
  const bool apart = bundle_.stage == 3;
  const auto options =
      bundle_.parameters[0].tensor.options().requires_grad(false);
  if (apart) {
    piece_ = comm::zeros(group_, {cut.numel()}, options);
    full_ = comm::FlatBuffer(cut.full_shapes(), options);
    full_bytes_ = static_cast<int64_t>(full_.flat().nbytes());
  }
  for (size_t i = 0; i < cut.count(); ++i) {
    at::Tensor parameter = bundle_.parameters[i].tensor;
    const at::Tensor filled = window_of(parameter);
    const at::Tensor full =
        apart ? full_.view(i) : at::empty(cut.full_shapes()[i], options);
    whole_.push_back(window_of(full));
    local_.push_back(window_of(apart ? cut.in_piece(piece_, i, group_.rank())
                                     : cut.rows_of(full, i, group_.rank())));
    local_.back().copy_(filled);
    parameter.set_data(full);
  }
  if (apart) free();
}

void ParameterStorage::begin_gather(comm::Mode mode) {
  if (!bundle_.is_sharded()) return;
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryKind::kParameters);
  const Cut& cut = bundle_.cut;
  sent_ = piece_;
  if (bundle_.stage == 3) {
    resize_storage(full_.flat(), full_bytes_);
  } else {
    sent_ = comm::zeros(group_, {cut.numel()}, whole_[0].options());
    for (size_t i = 0; i < cut.count(); ++i) {
      cut.in_piece(sent_, i, group_.rank()).copy_(local_[i]);
    }
  }
  pieces_ = at::empty({group_.size(), cut.numel()}, sent_.options());
  work_ = group_.all_gather(pieces_, sent_, mode);
}

void ParameterStorage::await_gather() {
  if (!bundle_.is_sharded()) return;
  const at::NoGradGuard no_grad;
  work_.wait();
  for (int64_t rank = 0; rank < group_.size(); ++rank) {
    const at::Tensor piece = pieces_[rank];
    for (size_t i = 0; i < whole_.size(); ++i) {
      bundle_.cut.rows_of(whole_[i], i, rank)
          .copy_(bundle_.cut.in_piece(piece, i, rank));
    }
  }
  work_ = {};
  sent_ = pieces_ = at::Tensor();
}

void ParameterStorage::take_full() {
  if (!bundle_.is_sharded() || bundle_.stage < 3) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < local_.size(); ++i) {
    local_[i].copy_(bundle_.cut.rows_of(whole_[i], i, group_.rank()));
  }
}

void ParameterStorage::free() {
  if (bundle_.is_sharded() && bundle_.stage == 3) {
    resize_storage(full_.flat(), 0);
  }
}

}  // namespace tessera::parallel::data
