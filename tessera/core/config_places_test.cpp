#include "tessera/core/config_places.h"

#include <gtest/gtest.h>

namespace tessera::config {
namespace {

TEST(ConfigPlaces, AreOfTheKeysThatAMessageNames) {
  const Provenance provenance = {{"mesh.dp", "run.json:3:8"},
                                 {"mesh.dp_shard", "--mesh.dp_shard=2"},
                                 {"mesh.tp", "default"},
                                 {"zero.stage", "ds.json:9:4: zero.stage"}};
  EXPECT_EQ(with_places("mesh.dp is 3. Use 4.", provenance),
            "mesh.dp is 3. Use 4. (mesh.dp: run.json:3:8)");
  EXPECT_EQ(with_places("mesh.tp is 3, mesh.dp_shard 2.", provenance),
            "mesh.tp is 3, mesh.dp_shard 2. (mesh.dp_shard: "
            "--mesh.dp_shard=2)");
  EXPECT_EQ(with_places("zero.stage and mesh.dp.", provenance),
            "zero.stage and mesh.dp. (mesh.dp: run.json:3:8; zero.stage: "
            "ds.json:9:4: zero.stage)");
  EXPECT_EQ(
      with_places("mesh.dp is 3: old.json:2:4: zero.stage is 9.", provenance),
      "mesh.dp is 3: old.json:2:4: zero.stage is 9. (mesh.dp: "
      "run.json:3:8)");
  for (const char* plain :
       {"mesh.dps", "a.mesh.dp", "mesh.dp.more", "--mesh.dp=4", "dp",
        "mesh.dp is 3 (run.json:3:8)"}) {
    EXPECT_EQ(with_places(plain, provenance), plain);
  }
}

}  // namespace
}  // namespace tessera::config
