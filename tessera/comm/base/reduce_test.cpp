#include "tessera/comm/base/reduce.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tessera/comm/base/kernels/kernels.h"
#include "tessera/comm/verb.h"
#include "tessera/core/vectors.h"

namespace tessera::comm {
namespace {

using kernels::Kernels;
using kernels::Kind;

constexpr int kInputs = 3;

struct Dtype {
  at::ScalarType dtype;
  Kind kind;
};
constexpr Dtype kDtypes[] = {
    {at::kDouble, Kind::kF64}, {at::kFloat, Kind::kF32},
    {at::kHalf, Kind::kF16},   {at::kBFloat16, Kind::kBF16},
    {at::kLong, Kind::kI64},   {at::kInt, Kind::kI32},
    {at::kShort, Kind::kI16},  {at::kChar, Kind::kI8},
    {at::kByte, Kind::kU8}};

at::Tensor random_tensor(int64_t numel, at::ScalarType dtype) {
  if (at::isFloatingType(dtype)) return at::randn({numel}).to(dtype);
  return at::randint(-100, 100, {numel}, at::kLong).to(dtype);
}

// What LibTorch makes of it, one input after the other.
at::Tensor expected_of(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor result = narrow ? inputs[0].to(at::kFloat) : inputs[0].clone();
  for (size_t p = 1; p < inputs.size(); ++p) {
    const at::Tensor next = inputs[p].to(result.scalar_type());
    if (op == ReduceOp::kMin) {
      result = at::minimum(result, next);
    } else if (op == ReduceOp::kMax) {
      result = at::maximum(result, next);
    } else if (op == ReduceOp::kProduct) {
      result = result * next;
    } else {
      result = result + next;
    }
  }
  if (op == ReduceOp::kMean)
    result = result / static_cast<double>(inputs.size());
  return result.to(dtype);
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 ||
          std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

TEST(Reduce, IsLibTorchsBitForBitWithEveryVector) {
  at::manual_seed(1);
  for (const auto& [dtype, kind] : kDtypes) {
    for (int op = 0; op < kernels::kNumOps; ++op) {
      const auto reduction = static_cast<ReduceOp>(op);
      if (reduction == ReduceOp::kMean && !at::isFloatingType(dtype)) continue;
      for (const int64_t numel : {0, 1, 3, 15, 64, 65, 257, 4099}) {
        std::vector<at::Tensor> inputs;
        std::vector<const char*> from;
        for (int p = 0; p < kInputs; ++p) {
          inputs.push_back(random_tensor(numel, dtype));
          from.push_back(static_cast<const char*>(inputs[p].data_ptr()));
        }
        const at::Tensor expected = expected_of(inputs, reduction);
        for (const Kernels* vectors : that_run_here(kernels::kByVectors)) {
          for (const auto stores :
               {Stores::kOrdinary, Stores::kStreaming, Stores::kAskedAhead}) {
            std::vector<at::Tensor> outputs = {at::zeros_like(inputs[0]),
                                               at::zeros_like(inputs[0])};
            std::vector<char*> to = {static_cast<char*>(outputs[0].data_ptr()),
                                     static_cast<char*>(outputs[1].data_ptr())};
            vectors->reduce({.inputs = from.data(),
                             .num_inputs = kInputs,
                             .outputs = to.data(),
                             .num_outputs = 2,
                             .numel = numel,
                             .streaming = stores == Stores::kStreaming,
                             .asks_ahead = stores == Stores::kAskedAhead},
                            kind, static_cast<kernels::Op>(op));
            for (const at::Tensor& output : outputs) {
              EXPECT_TRUE(same_bytes(output, expected))
                  << vectors->name << ' ' << dtype << ' ' << name_of(reduction)
                  << ' ' << numel << " stores " << static_cast<int>(stores);
            }
          }
        }
      }
    }
  }
}

// Every fp16 and bf16 there is, by way of a sum with zero.
TEST(Reduce, KeepsEverySixteenBitNumber) {
  const at::Tensor all = at::arange(0, 1 << 16).to(at::kInt).to(at::kShort);
  for (const auto& [dtype, kind] : std::vector<Dtype>{
           {at::kHalf, Kind::kF16}, {at::kBFloat16, Kind::kBF16}}) {
    const at::Tensor numbers = all.view(dtype);
    const at::Tensor zeros = at::zeros_like(numbers);
    const at::Tensor sum = numbers.to(at::kFloat) + 0.0;
    for (const Kernels* vectors : that_run_here(kernels::kByVectors)) {
      at::Tensor output = at::empty_like(numbers);
      const std::vector<const char*> from = {
          static_cast<const char*>(numbers.data_ptr()),
          static_cast<const char*>(zeros.data_ptr())};
      char* to = static_cast<char*>(output.data_ptr());
      vectors->reduce({.inputs = from.data(),
                       .num_inputs = 2,
                       .outputs = &to,
                       .num_outputs = 1,
                       .numel = 1 << 16,
                       .streaming = false},
                      kind, kernels::Op::kSum);
      const at::Tensor back = output.to(at::kFloat);
      EXPECT_TRUE(at::equal(at::isnan(back), at::isnan(sum))) << vectors->name;
      EXPECT_TRUE(at::equal(at::nan_to_num(back), at::nan_to_num(sum)))
          << vectors->name << ' ' << dtype;
    }
  }
}

TEST(Reduce, ANaNWinsInMinAndMax) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor a = at::tensor({nan, 1.0F, 2.0F});
  const at::Tensor b = at::tensor({3.0F, nan, 5.0F});
  const std::vector<const void*> inputs = {a.data_ptr(), b.data_ptr()};
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    at::Tensor output = at::zeros({3});
    reduce(inputs, output.data_ptr(), 3, at::kFloat, op);
    EXPECT_TRUE(std::isnan(output[0].item<float>()));
    EXPECT_TRUE(std::isnan(output[1].item<float>()));
    EXPECT_EQ(output[2].item<float>(), op == ReduceOp::kMin ? 2.0F : 5.0F);
  }
}

TEST(CopyBytes, FromAndToAnyAddress) {
  const at::Tensor from = at::randint(0, 255, {5000}, at::kByte);
  for (const auto stores :
       {Stores::kOrdinary, Stores::kStreaming, Stores::kAskedAhead}) {
    for (const int64_t begin : {0, 1, 31, 64}) {
      for (const int64_t bytes : {0, 1, 63, 64, 300, 4096}) {
        at::Tensor to = at::zeros({5000}, at::kByte);
        copy_bytes(to.data_ptr<uint8_t>() + begin + 7,
                   from.data_ptr<uint8_t>() + begin, bytes, stores);
        at::Tensor expected = at::zeros({5000}, at::kByte);
        expected.narrow(0, begin + 7, bytes)
            .copy_(from.narrow(0, begin, bytes));
        EXPECT_TRUE(at::equal(to, expected)) << begin << ' ' << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::comm
