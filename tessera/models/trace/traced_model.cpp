#include "tessera/models/trace/traced_model.h"

namespace tessera::models::trace {

TracedModel::TracedModel(const ModelConfig& model, int64_t num_samples,
                         int64_t seq_len)
    : config(model), samples(num_samples), tokens(seq_len) {
  config.complete();
  heads = config.heads;
  kv_heads = config.kv_heads;
  ffn = expert_ffn = config.ffn;
  vocab = config.vocab;
  experts = config.moe.experts;
}

}  // namespace tessera::models::trace
