#include "tessera/parallel/data/parameter_storage.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

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

at::Tensor take_memory(const at::Tensor& tensor) {
  c10::StorageImpl& from = *tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = from.nbytes();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      from.set_data_ptr({nullptr, tensor.device()}), from.allocator(),
      /*resizable=*/true);
  from.set_nbytes(0);
  return at::empty({0}, tensor.options())
      .set_(c10::Storage(std::move(storage)), tensor.storage_offset(),
            tensor.sizes(), tensor.strides());
}

ParameterStorage::ParameterStorage(const Bundle& bundle, comm::Group& shards,
                                   std::optional<at::ScalarType> full,
                                   const KeptMemory& memory)
    : bundle_(bundle),
      group_(shards),
      full_type_(full.value_or(bundle.dtype)),
      apart_((bundle.is_sharded() && bundle.stage == 3) ||
             full_type_ != bundle.dtype),
      direct_(bundle.is_sharded() && travels_alone(bundle.cut)) {
  const at::NoGradGuard no_grad;
  lay_out(memory);
}

at::TensorOptions ParameterStorage::full_options() const {
  const at::Tensor& like = bundle_.parameters[0].tensor;
  return like.options().requires_grad(false).dtype(full_type_);
}

at::Tensor ParameterStorage::kept(const KeptMemory& memory,
                                  at::IntArrayRef sizes, at::ScalarType type) {
  return memory ? memory(sizes, type)
                : comm::zeros(group_, sizes, full_options().dtype(type));
}

void ParameterStorage::lay_out(const KeptMemory& memory) {
  const MemoryScope scope(MemoryKind::kParameters);
  if (!bundle_.is_sharded()) {
    for (const auto& parameter : bundle_.parameters) {
      at::Tensor tensor = parameter.tensor;
      local_.push_back(window_of(tensor));
      if (apart_) tensor.set_data(window_of(tensor).to(full_type_));
      whole_.push_back(window_of(tensor));
    }
    return;
  }
  const Cut& cut = bundle_.cut;
  if (apart_) piece_ = kept(memory, {cut.numel()}, bundle_.dtype);
  for (size_t i = 0; i < cut.count(); ++i) {
    at::Tensor parameter = bundle_.parameters[i].tensor;
    const at::Tensor filled = window_of(parameter);
    const at::Tensor full = empty_full(i, memory);
    whole_.push_back(window_of(full));
    local_.push_back(window_of(apart_ ? cut.in_piece(piece_, i, group_.rank())
                                      : cut.rows_of(full, i, group_.rank())));
    local_.back().copy_(filled);
    parameter.set_data(full);
  }
  if (bundle_.stage == 3) free();
}

at::Tensor ParameterStorage::empty_full(size_t i, const KeptMemory& memory) {
  const Cut& cut = bundle_.cut;
  const auto& shape = cut.full_shapes()[i];
  const int64_t pieces = cut.ranks() * cut.numel();
  if (bundle_.stage == 3) {
    if (i == 0) {
      full_ = direct_ ? comm::FlatBuffer({{pieces}}, full_options())
                      : comm::FlatBuffer(cut.full_shapes(), full_options());
      full_bytes_ = static_cast<int64_t>(full_.flat().nbytes());
    }
    if (!direct_) return full_.view(i);
    all_pieces_ = full_.view(0);
  } else if (direct_) {
    all_pieces_ = kept(memory, {pieces}, full_type_);
  } else {
    return memory ? memory(shape, full_type_)
                  : at::empty(shape, full_options());
  }
  return window_of(
      all_pieces_.narrow(0, 0, c10::multiply_integers(shape)).view(shape));
}

void ParameterStorage::begin_gather(comm::Mode mode) {
  if (!bundle_.is_sharded()) return;  // what is rounded is so in await_gather()
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryKind::kParameters);
  const Cut& cut = bundle_.cut;
  if (bundle_.stage == 3) resize_storage(full_.flat(), full_bytes_);
  sent_ = piece_;
  if (direct_ && !apart_) {
    sent_ = all_pieces_.narrow(0, group_.rank() * cut.numel(), cut.numel());
  } else if (!apart_ || piece_.scalar_type() != full_type_) {
    sent_ = comm::zeros(group_, {cut.numel()}, full_options());
    for (size_t i = 0; i < cut.count(); ++i) {
      cut.in_piece(sent_, i, group_.rank()).copy_(local_[i]);
    }
  }
  pieces_ = direct_ ? all_pieces_.view({group_.size(), cut.numel()})
                    : at::empty({group_.size(), cut.numel()}, sent_.options());
  work_ = group_.all_gather(pieces_, sent_, mode);
}

void ParameterStorage::await_gather() {
  const at::NoGradGuard no_grad;
  if (!bundle_.is_sharded()) {
    for (size_t i = 0; apart_ && i < whole_.size(); ++i) {
      whole_[i].copy_(local_[i]);
    }
    return;
  }
  work_.wait();
  for (int64_t rank = 0; !direct_ && rank < group_.size(); ++rank) {
    const at::Tensor piece = pieces_[rank];
    for (size_t i = 0; i < whole_.size(); ++i) {
      bundle_.cut.rows_of(whole_[i], i, rank)
          .copy_(bundle_.cut.in_piece(piece, i, rank));
    }
  }
  work_ = {};
  sent_ = pieces_ = at::Tensor();
}

std::vector<at::Tensor> ParameterStorage::full_masters() {
  if (full_type_ == bundle_.dtype) return whole_;
  const at::NoGradGuard no_grad;
  const Cut& cut = bundle_.cut;
  std::vector<at::Tensor> masters;
  if (!bundle_.is_sharded()) {
    for (const auto& shard : local_) masters.push_back(shard.clone());
    return masters;
  }
  const at::Tensor pieces =
      at::empty({group_.size(), cut.numel()}, piece_.options());
  group_.all_gather(pieces, piece_).wait();
  for (size_t i = 0; i < whole_.size(); ++i) {
    masters.push_back(at::empty(cut.full_shapes()[i], piece_.options()));
    for (int64_t rank = 0; rank < group_.size(); ++rank) {
      cut.rows_of(masters[i], i, rank)
          .copy_(cut.in_piece(pieces[rank], i, rank));
    }
  }
  return masters;
}

void ParameterStorage::take(const std::vector<at::Tensor>& full_masters) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < local_.size(); ++i) {
    const at::Tensor& full = full_masters[i];
    local_[i].copy_(bundle_.is_sharded()
                        ? bundle_.cut.rows_of(full, i, group_.rank())
                        : full);
  }
}

void ParameterStorage::free() {
  if (bundle_.is_sharded() && bundle_.stage == 3) {
    resize_storage(full_.flat(), 0);
  }
}

}  // namespace tessera::parallel::data
