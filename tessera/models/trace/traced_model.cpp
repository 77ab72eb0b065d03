#include "tessera/models/trace/traced_model.h"

#include "tessera/models/adapters.h"

namespace tessera::models::trace {

TracedModel::TracedModel(const ModelConfig& model, int64_t num_samples,
                         int64_t seq_len)
    : config(model),
      samples(num_samples),
      tokens(seq_len),
      whole_tokens(seq_len) {
  config.complete();
  heads = config.heads;
  kv_heads = config.kv_heads;
  ffn = config.ffn;
  expert_ffn = config.moe.ffn;
  shared_ffn = config.moe.shared_experts * config.moe.ffn;
  vocab = most_vocab = config.vocab;
  experts = config.moe.experts;
  if (config.lora.rank == 0) return;
  const auto whole = make_model(config);
  for (const auto& layer : adapted_linears(*whole)) {
    const size_t dot = layer.name.rfind('.');
    adapted.insert(layer.name.substr(layer.name.rfind('.', dot - 1) + 1));
  }
}

}  // namespace tessera::models::trace
