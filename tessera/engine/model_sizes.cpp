#include "tessera/engine/model_sizes.h"

#include <algorithm>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/models/family.h"

namespace tessera::engine {
namespace {

template <typename T>
void take(T& mine, const T& folders, const std::string& key,
          const config::Provenance& origins) {
  TS_CHECK_CONFIG(!config::is_set(origins, key) || mine == folders, key, " is ",
                  mine, " (", origins.at(key),
                  "), but the folder in model.from has ", folders,
                  ". Leave the key out.");
  mine = folders;
}

// How long sequences get is the user's, unless each position is a parameter.
void take_length(models::ModelConfig& mine, const models::ModelConfig& folder,
                 const config::Provenance& origins) {
  const bool is_users = config::is_set(origins, "model.max_seq") &&
                        !models::family_named(folder.family).learned_positions;
  if (!is_users) take(mine.max_seq, folder.max_seq, "model.max_seq", origins);
}

// Who says something of it says it all.
void take_rope_scaling(models::RopeScalingConfig& mine,
                       const models::RopeScalingConfig& folders,
                       const config::Provenance& origins) {
  const bool says = std::ranges::any_of(origins, [&](const auto& origin) {
    return origin.first.starts_with("model.rope_scaling.") &&
           config::is_set(origins, origin.first);
  });
  if (!says) mine = folders;
}

// A folder's modules may be left out, as they are where nothing trains them,
// and a model begin with new ones.
void take_mtp(RunConfig& config, int64_t depths,
              const config::Provenance& origins) {
  auto& model = config.model;
  if (!config::is_set(origins, "model.mtp.layers")) {
    const bool has_adapters = model.lora.rank > 0 || !model.lora.from.empty();
    model.mtp.layers = has_adapters || config.mesh.star() ? 0 : depths;
  }
  TS_CHECK_CONFIG(!model.load_weights || model.mtp.layers == 0 ||
                      model.mtp.layers == depths,
                  "model.mtp.layers is ", model.mtp.layers,
                  ", but model.from has the weights of ", depths,
                  " modules. Use model.mtp.layers ",
                  depths > 0 ? c10::str(depths, " or ") : "",
                  "0, or train from the beginning (model.load_weights false).");
}

}  // namespace

void read_model_folder(RunConfig& config, const config::Provenance& origins) {
  auto& model = config.model;
  TS_CHECK_CONFIG(!model.load_weights || !model.from.empty(),
                  "model.load_weights is true, but model.from is empty. Set "
                  "model.from to the folder that holds the weights.");
  if (model.from.empty()) return;
  take_sizes(config, checkpoint::hugging_face_config(model.from).model,
             origins);
  TS_CHECK_CONFIG(
      !model.load_weights || !model.moe.bias_balance ||
          models::family_named(model.family).score_bias,
      "model.moe.bias_balance is true, but the weights of a Hugging Face "
      "folder "
      "of model.family ",
      model.family,
      " have no bias to load. Balance by model.moe.aux_loss, or train from the "
      "beginning.");
}

void take_sizes(RunConfig& config, const models::ModelConfig& folder,
                const config::Provenance& origins) {
  auto& model = config.model;
  take(model.family, folder.family, "model.family", origins);
  take(model.layers, folder.layers, "model.layers", origins);
  take(model.hidden, folder.hidden, "model.hidden", origins);
  take(model.heads, folder.heads, "model.heads", origins);
  take(model.kv_heads, folder.kv_heads, "model.kv_heads", origins);
  take(model.head_dim, folder.head_dim, "model.head_dim", origins);
  take(model.ffn, folder.ffn, "model.ffn", origins);
  take(model.vocab, folder.vocab, "model.vocab", origins);
  take_length(model, folder, origins);
  take(model.tie_embeddings, folder.tie_embeddings, "model.tie_embeddings",
       origins);
  take(model.norm_eps, folder.norm_eps, "model.norm_eps", origins);
  take(model.query_pre_attn_scalar, folder.query_pre_attn_scalar,
       "model.query_pre_attn_scalar", origins);
  take(model.rope_theta, folder.rope_theta, "model.rope_theta", origins);
  take(model.rope_theta_local, folder.rope_theta_local,
       "model.rope_theta_local", origins);
  take_rope_scaling(model.rope_scaling, folder.rope_scaling, origins);
  take(model.window, folder.window, "model.window", origins);
  take(model.window_every, folder.window_every, "model.window_every", origins);
  take(model.window_first_full, folder.window_first_full,
       "model.window_first_full", origins);
  take(model.latent.q_rank, folder.latent.q_rank, "model.latent.q_rank",
       origins);
  take(model.latent.kv_rank, folder.latent.kv_rank, "model.latent.kv_rank",
       origins);
  take(model.latent.rope_dim, folder.latent.rope_dim, "model.latent.rope_dim",
       origins);
  take(model.latent.value_dim, folder.latent.value_dim,
       "model.latent.value_dim", origins);
  take_mtp(config, folder.mtp.layers, origins);
  take(model.moe.experts, folder.moe.experts, "model.moe.experts", origins);
  take(model.moe.top_k, folder.moe.top_k, "model.moe.top_k", origins);
  take(model.moe.every, folder.moe.every, "model.moe.every", origins);
  take(model.moe.first_dense, folder.moe.first_dense, "model.moe.first_dense",
       origins);
  take(model.moe.ffn, folder.moe.ffn, "model.moe.ffn", origins);
  take(model.moe.score, folder.moe.score, "model.moe.score", origins);
  take(model.moe.normalize, folder.moe.normalize, "model.moe.normalize",
       origins);
  take(model.moe.scale, folder.moe.scale, "model.moe.scale", origins);
  take(model.moe.groups, folder.moe.groups, "model.moe.groups", origins);
  take(model.moe.top_groups, folder.moe.top_groups, "model.moe.top_groups",
       origins);
  take(model.moe.shared_experts, folder.moe.shared_experts,
       "model.moe.shared_experts", origins);
  // No sizes: how it is trained is the user's, and else as it was.
  const auto take_unless_set = [&](auto& mine, const auto& folders,
                                   const char* key) {
    if (!config::is_set(origins, key)) mine = folders;
  };
  take_unless_set(model.moe.aux_loss, folder.moe.aux_loss,
                  "model.moe.aux_loss");
  take_unless_set(model.moe.choice, folder.moe.choice, "model.moe.choice");
  take(model.moe.noise, folder.moe.noise, "model.moe.noise", origins);
  take_unless_set(model.moe.balance, folder.moe.balance, "model.moe.balance");
  take_unless_set(model.moe.z_loss, folder.moe.z_loss, "model.moe.z_loss");
  take_unless_set(model.moe.bias_balance, folder.moe.bias_balance,
                  "model.moe.bias_balance");
  take_unless_set(model.moe.bias_rate, folder.moe.bias_rate,
                  "model.moe.bias_rate");
  take_unless_set(model.moe.capacity_factor, folder.moe.capacity_factor,
                  "model.moe.capacity_factor");
  take_unless_set(model.dropout, folder.dropout, "model.dropout");
}

}  // namespace tessera::engine
