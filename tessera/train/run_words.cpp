#include "tessera/train/run_words.h"

#include <c10/util/StringUtil.h>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/peft_folder.h"
#include "tessera/comm/agree.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/engine/cut_text.h"
#include "tessera/engine/run_devices.h"
#include "tessera/models/product_types.h"
#include "tessera/nn/fp8_product.h"

namespace tessera::train {

void compare_devices(const engine::RunConfig& config, comm::Group& world) {
  if (world.size() == 1) return;
  const std::string here = config.run.device_text();
  const std::string there = comm::text_of_rank_0(world, here);
  const std::string complaint = comm::first_complaint(
      world,
      here == there
          ? ""
          : c10::str("run.device is ", config.run.device, ", which is ", here,
                     " on the host of rank ", world.rank(), " and ", there,
                     " on that of rank 0. Say which: cpu, cuda, or "
                     "one for each stage of the pipeline."));
  TS_CHECK_CONFIG(complaint.empty(), complaint);
}

void tell_devices(const engine::RunConfig& config) {
  const auto why = engine::why_not_on_gpus(config);
  const bool is_left = config.run.is_on_cpu() && num_gpus() > 0 &&
                       config.run.device.find("auto") != std::string::npos;
  if (is_left && why) {
    log::info("run.device ", config.run.device, ": cpu, for ", why->what,
              ", which no GPU is built for");
  } else if (!config.run.is_on_cpu()) {
    log::info("run.device ", config.run.device, ": ", config.run.device_text());
  }
  const std::string emulation = engine::emulation_text(config);
  if (!emulation.empty()) log::info(emulation);
}

void tell_adapters(const engine::RunConfig& config) {
  if (config.model.lora.rank == 0) return;
  const std::string complaint = comm::complaint_of(
      [&] { checkpoint::check_peft_has_adapters_of(config.model); });
  if (complaint.empty()) return;
  log::warning("tessera convert will write this run with --merge alone. ",
               complaint);
}

void tell_shares(const engine::RunConfig& config, bool speeds_are_measured) {
  const auto& speeds = config.mesh.speeds;
  if (speeds_are_measured) {
    log::info("mesh.measure_speeds: ",
              speeds.empty()
                  ? "all ranks are as fast as each other, within a tenth"
                  : c10::str("relative speeds ", c10::Join(", ", speeds)));
  }
  if (config.mesh.pp > 1) log::info(engine::split_text(config));
  const std::string seen = engine::seen_text(config);
  if (!seen.empty()) log::info(config.pipeline.cut, ": ", seen);
  const std::string shares = engine::shares_text(config);
  if (!shares.empty()) log::info(shares);
}

void tell_left_out(const engine::RunConfig& config) {
  const auto& model = config.model;
  if (!model.load_weights || !checkpoint::is_hugging_face_folder(model.from)) {
    return;
  }
  const int64_t depths =
      checkpoint::hugging_face_config(model.from).model.mtp.layers;
  if (depths <= model.mtp.layers) return;
  log::warning("model.from has ", depths,
               " modules that predict more than the next token (MTP), which "
               "this run leaves out",
               model.lora.rank > 0 ? ", as adapters have none" : "",
               ": neither it nor what is exported of it has them");
}

void tell_fp8_layers(const engine::RunConfig& config,
                     engine::RankModel& model) {
  if (!config.precision.is_fp8()) return;
  const auto layers = models::fp8_layers(model.decoder());
  if (layers.taken == layers.all) return;
  log::warning("precision.products is fp8, by which ", layers.taken, " of ",
               layers.all,
               " linear layers of rank 0 multiply: the weights of the others "
               "have a side that is no multiple of 16, and stay bf16");
}

}  // namespace tessera::train
