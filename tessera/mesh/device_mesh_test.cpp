#include "tessera/mesh/device_mesh.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "tessera/core/error.h"

namespace tessera::mesh {
namespace {

using Ranks = std::vector<int64_t>;
using Groups = std::set<Ranks>;

// Every way to write `world` as a product of five degrees.
std::vector<Degrees> meshes_of(int64_t world) {
  std::vector<Degrees> meshes;
  const auto divides = [](int64_t d, int64_t n) { return n % d == 0; };
  for (int64_t pp = 1; pp <= world; ++pp) {
    if (!divides(pp, world)) continue;
    for (int64_t replicate = 1; pp * replicate <= world; ++replicate) {
      if (!divides(pp * replicate, world)) continue;
      for (int64_t shard = 1; pp * replicate * shard <= world; ++shard) {
        if (!divides(pp * replicate * shard, world)) continue;
        const int64_t rest = world / (pp * replicate * shard);
        for (int64_t cp = 1; cp <= rest; ++cp) {
          if (!divides(cp, rest)) continue;
          meshes.push_back({.pp = pp,
                            .dp_replicate = replicate,
                            .dp_shard = shard,
                            .cp = cp,
                            .tp = rest / cp});
        }
      }
    }
  }
  return meshes;
}

Groups groups_of(const DeviceMesh& mesh, std::initializer_list<Axis> axes) {
  Groups groups;
  for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
    groups.insert(mesh.peers(rank, axes));
  }
  return groups;
}

// Every rank is in one group, and all groups have the same size.
void expect_partition(const Groups& groups, int64_t world, int64_t size) {
  std::set<int64_t> seen;
  for (const Ranks& group : groups) {
    EXPECT_EQ(static_cast<int64_t>(group.size()), size);
    EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
    for (int64_t rank : group) EXPECT_TRUE(seen.insert(rank).second);
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), world);
}

std::string refusal(const Degrees& degrees, int64_t world,
                    std::vector<Axis> order = {}) {
  try {
    DeviceMesh mesh(degrees, world, std::move(order));
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return error.what_without_backtrace();
  }
  return "";
}

TEST(DeviceMesh, EveryMeshUpTo16RanksInEveryOrder) {
  size_t checked = 0;
  for (int64_t world = 1; world <= 16; ++world) {
    for (const Degrees& degrees : meshes_of(world)) {
      std::vector<Axis> order(kAxes.begin(), kAxes.end());
      do {
        const DeviceMesh mesh(degrees, world, order);
        for (int64_t rank = 0; rank < world; ++rank) {
          ASSERT_EQ(mesh.rank_at(mesh.coord_of(rank)), rank);
        }
        ++checked;
      } while (std::next_permutation(order.begin(), order.end()));
    }
  }
  EXPECT_EQ(checked, 341 * 120);
}

TEST(DeviceMesh, PeersPartitionTheWorldOnEveryMeshUpTo16Ranks) {
  for (int64_t world = 1; world <= 16; ++world) {
    for (const Degrees& degrees : meshes_of(world)) {
      const DeviceMesh mesh(degrees, world);
      for (Axis a : kAxes) {
        expect_partition(groups_of(mesh, {a}), world, mesh.degree(a));
        for (Axis b : kAxes) {
          if (a == b) continue;
          expect_partition(groups_of(mesh, {a, b}), world,
                           mesh.degree(a) * mesh.degree(b));
        }
      }
      expect_partition(groups_of(mesh, {Axis::kPp, Axis::kDpReplicate,
                                        Axis::kDpShard, Axis::kCp, Axis::kTp}),
                       world, world);
    }
  }
}

TEST(DeviceMesh, PeersDifferOnlyAlongTheirAxes) {
  const DeviceMesh mesh(
      {.pp = 2, .dp_replicate = 2, .dp_shard = 3, .cp = 1, .tp = 2}, 24);
  for (int64_t rank = 0; rank < 24; ++rank) {
    for (int64_t peer : mesh.peers(rank, {Axis::kDpShard, Axis::kTp})) {
      const Coord mine = mesh.coord_of(rank), theirs = mesh.coord_of(peer);
      for (Axis axis : {Axis::kPp, Axis::kDpReplicate, Axis::kCp}) {
        EXPECT_EQ(mine[axis], theirs[axis]);
      }
    }
    EXPECT_EQ(mesh.peers(rank, {}), Ranks{rank});
  }
}

TEST(DeviceMesh, ExpertViewsOfEveryMeshUpTo16RanksInEveryOrder) {
  size_t checked = 0;
  for (int64_t world = 1; world <= 16; ++world) {
    for (Degrees degrees : meshes_of(world)) {
      for (int64_t etp : std::set<int64_t>{1, degrees.tp}) {
        const int64_t folded = world / degrees.pp / etp;
        for (int64_t ep = 1; ep <= folded; ++ep) {
          degrees.ep = ep;
          degrees.etp = etp;
          if (folded % ep != 0) {
            EXPECT_NE(refusal(degrees, world), "");
            continue;
          }
          const DeviceMesh mesh(degrees, world,
                                {Axis::kTp, Axis::kDpShard, Axis::kPp,
                                 Axis::kCp, Axis::kDpReplicate});
          for (const DeviceMesh& each : {mesh, DeviceMesh(degrees, world)}) {
            EXPECT_EQ(each.degree(Axis::kExpertDp), folded / ep);
            std::set<std::array<int64_t, 4>> places;
            for (int64_t rank = 0; rank < world; ++rank) {
              const Coord coord = each.coord_of(rank);
              ASSERT_EQ(each.rank_at(coord), rank);
              places.insert({coord[Axis::kPp], coord[Axis::kExpertDp],
                             coord[Axis::kEp], coord[Axis::kEtp]});
            }
            ASSERT_EQ(static_cast<int64_t>(places.size()), world);
            for (Axis axis : kExpertAxes) {
              expect_partition(groups_of(each, {axis}), world,
                               each.degree(axis));
            }
            if (etp > 1) {
              EXPECT_EQ(groups_of(each, {Axis::kEtp}),
                        groups_of(each, {Axis::kTp}));
            }
            ++checked;
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 2000);
}

// Where dp_replicate is outermost of what is folded, experts may stay inside a
// replica: then the axis is the same in both views, and all others are those
// that the replica has by itself.
TEST(DeviceMesh, ExpertViewsByReplicaOfEveryMeshUpTo16Ranks) {
  size_t checked = 0;
  for (int64_t world = 1; world <= 16; ++world) {
    for (Degrees degrees : meshes_of(world)) {
      for (int64_t etp : std::set<int64_t>{1, degrees.tp}) {
        const int64_t folded = world / degrees.pp / degrees.dp_replicate / etp;
        for (int64_t ep = 1; ep <= folded; ++ep) {
          degrees.ep = ep;
          degrees.etp = etp;
          degrees.expert_replicate = degrees.dp_replicate;
          if (folded % ep != 0) {
            EXPECT_NE(refusal(degrees, world), "");
            continue;
          }
          const DeviceMesh mesh(degrees, world);
          EXPECT_EQ(mesh.degree(Axis::kExpertReplicate), degrees.dp_replicate);
          EXPECT_EQ(mesh.degree(Axis::kExpertDp), folded / ep);
          EXPECT_EQ(groups_of(mesh, {Axis::kExpertReplicate}),
                    groups_of(mesh, {Axis::kDpReplicate}));
          Degrees one = degrees;
          one.dp_replicate = one.expert_replicate = 1;
          const int64_t ranks = world / degrees.dp_replicate;
          const DeviceMesh replica(one, ranks);
          std::set<std::array<int64_t, 5>> places;
          for (int64_t rank = 0; rank < world; ++rank) {
            const Coord coord = mesh.coord_of(rank);
            ASSERT_EQ(coord[Axis::kExpertReplicate], coord[Axis::kDpReplicate]);
            Coord at = coord;
            at[Axis::kDpReplicate] = 0;
            const Coord inside = replica.coord_of(replica.rank_at(at));
            std::array<int64_t, 5> place = {};
            for (size_t i = 0; i < kExpertAxes.size(); ++i) {
              const Axis axis = kExpertAxes.at(i);
              place.at(i) = coord[axis];
              if (axis == Axis::kExpertReplicate) continue;
              ASSERT_EQ(coord[axis], inside[axis]);
            }
            places.insert(place);
            for (int64_t peer :
                 mesh.peers(rank, {Axis::kExpertDp, Axis::kEp, Axis::kEtp})) {
              ASSERT_EQ(mesh.coord_of(peer)[Axis::kDpReplicate],
                        coord[Axis::kDpReplicate]);
            }
          }
          ASSERT_EQ(static_cast<int64_t>(places.size()), world);
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 800);
}

TEST(DeviceMesh, ExpertsByReplicaAskForReplicasThatAreNeighbours) {
  const Degrees degrees{
      .dp_replicate = 2, .dp_shard = 2, .tp = 2, .expert_replicate = 2};
  const std::vector<Axis> tp_first = {Axis::kTp, Axis::kDpReplicate, Axis::kPp,
                                      Axis::kDpShard, Axis::kCp};
  EXPECT_EQ(refusal(degrees, 8, tp_first),
            "mesh.order has tp before dp_replicate, but with zero.expert_shard "
            "dp_shard experts stay inside a replica, whose ranks of a stage "
            "are neighbours then. Put dp_replicate before tp, or use "
            "zero.expert_shard all.");
  // An expert that is cut stays on its tp ranks; an axis of one rank, and
  // stages, keep nobody apart.
  Degrees cut = degrees;
  cut.etp = 2;
  EXPECT_EQ(refusal(cut, 8, tp_first), "");
  EXPECT_EQ(refusal(degrees, 8,
                    {Axis::kCp, Axis::kPp, Axis::kDpReplicate, Axis::kTp,
                     Axis::kDpShard}),
            "");

  Degrees wide = degrees;
  wide.ep = 8;
  EXPECT_EQ(refusal(wide, 8),
            "mesh.ep is 8, but with expert_replicate 2 (zero.expert_shard "
            "dp_shard) experts stay "
            "inside one of the 2 replicas (mesh.dp_replicate), which has 4 "
            "ranks of a stage, over etp 1. Use a divisor of 4, or "
            "zero.expert_shard all.");
  Degrees other = degrees;
  other.expert_replicate = 4;
  EXPECT_EQ(refusal(other, 8),
            "mesh: expert_replicate is 4. It is 1 (experts are sharded over "
            "all replicas) or mesh.dp_replicate, 2.");
  other.expert_replicate = 0;
  EXPECT_NE(refusal(other, 8), "");
}

// Layouts 1 to 4 of data, expert and tensor parallelism on four devices, with
// their groups.
TEST(DeviceMesh, LayoutOfExpertsAndData) {
  for (const Degrees& degrees :
       {Degrees{.dp_replicate = 4, .ep = 2}, Degrees{.dp_shard = 4, .ep = 2}}) {
    const DeviceMesh mesh(degrees, 4);
    EXPECT_EQ(groups_of(mesh, {Axis::kEp}), (Groups{{0, 1}, {2, 3}}));
    EXPECT_EQ(groups_of(mesh, {Axis::kExpertDp}), (Groups{{0, 2}, {1, 3}}));
    EXPECT_EQ(groups_of(mesh, {Axis::kDpReplicate, Axis::kDpShard}),
              (Groups{{0, 1, 2, 3}}));
    // 8 experts: the ranks of ep 0 hold experts 0-3, those of ep 1 4-7.
    EXPECT_EQ(mesh.coord_of(0)[Axis::kEp], 0);
    EXPECT_EQ(mesh.coord_of(1)[Axis::kEp], 1);
    EXPECT_EQ(mesh.coord_of(2)[Axis::kEp], 0);
    EXPECT_EQ(mesh.coord_of(3)[Axis::kEp], 1);
  }
}

TEST(DeviceMesh, LayoutOfExpertsDataAndTensor) {
  const DeviceMesh mesh({.dp_replicate = 2, .tp = 2, .ep = 2}, 4);
  EXPECT_EQ(groups_of(mesh, {Axis::kTp}), (Groups{{0, 1}, {2, 3}}));
  EXPECT_EQ(groups_of(mesh, {Axis::kDpReplicate}), (Groups{{0, 2}, {1, 3}}));
  EXPECT_EQ(groups_of(mesh, {Axis::kEp}), (Groups{{0, 1}, {2, 3}}));
  EXPECT_EQ(groups_of(mesh, {Axis::kExpertDp}), (Groups{{0, 2}, {1, 3}}));
}

TEST(DeviceMesh, LayoutOfExpertsAlone) {
  const DeviceMesh mesh({.dp_replicate = 4, .ep = 4}, 4);
  EXPECT_EQ(groups_of(mesh, {Axis::kEp}), (Groups{{0, 1, 2, 3}}));
  EXPECT_EQ(groups_of(mesh, {Axis::kExpertDp}), (Groups{{0}, {1}, {2}, {3}}));
}

TEST(DeviceMesh, LayoutsOfEightDevices) {
  const DeviceMesh pairs({.dp_replicate = 4, .tp = 2, .ep = 2}, 8);
  EXPECT_EQ(groups_of(pairs, {Axis::kEp}), groups_of(pairs, {Axis::kTp}));
  EXPECT_EQ(pairs.degree(Axis::kExpertDp), 4);

  const DeviceMesh replicas({.dp_replicate = 4, .tp = 2, .ep = 4}, 8);
  EXPECT_EQ(groups_of(replicas, {Axis::kEp}),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(groups_of(replicas, {Axis::kExpertDp}),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));

  const DeviceMesh wide({.dp_replicate = 2, .tp = 4, .ep = 4}, 8);
  EXPECT_EQ(groups_of(wide, {Axis::kEp}), groups_of(wide, {Axis::kTp}));
}

Ranks progression(int64_t first, int64_t step, int64_t count) {
  Ranks ranks;
  for (int64_t i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

TEST(DeviceMesh, Of4096Devices) {
  const Degrees degrees{.pp = 8, .dp_replicate = 64, .tp = 8};
  const DeviceMesh mesh(degrees, 4096);
  const Coord coord = mesh.coord_of(1234);
  EXPECT_EQ(coord[Axis::kPp], 2);
  EXPECT_EQ(coord[Axis::kDpReplicate], 26);
  EXPECT_EQ(coord[Axis::kTp], 2);
  EXPECT_EQ(mesh.peers(1234, {Axis::kTp}), progression(1232, 1, 8));
  EXPECT_EQ(mesh.peers(1234, {Axis::kPp}), progression(210, 512, 8));
  EXPECT_EQ(mesh.peers(1234, {Axis::kDpReplicate}), progression(1026, 8, 64));
  EXPECT_EQ(groups_of(mesh, {Axis::kTp}).size(), 512);
  EXPECT_EQ(groups_of(mesh, {Axis::kPp}).size(), 512);
  EXPECT_EQ(groups_of(mesh, {Axis::kDpReplicate}).size(), 64);
  EXPECT_EQ(groups_of(mesh, {Axis::kPp, Axis::kTp}).size(), 64);
}

TEST(DeviceMesh, ExpertsOf4096Devices) {
  Degrees degrees{.pp = 8, .dp_replicate = 64, .tp = 8, .ep = 64, .etp = 8};
  const DeviceMesh split(degrees, 4096);
  EXPECT_EQ(split.degree(Axis::kExpertDp), 1);
  EXPECT_EQ(groups_of(split, {Axis::kEp}),
            groups_of(split, {Axis::kDpReplicate}));
  EXPECT_EQ(split.peers(1234, {Axis::kEtp}), progression(1232, 1, 8));

  degrees.etp = 1;
  const DeviceMesh whole(degrees, 4096);
  EXPECT_EQ(whole.degree(Axis::kExpertDp), 8);
  EXPECT_EQ(whole.peers(1234, {Axis::kEp}), progression(1216, 1, 64));
  EXPECT_EQ(whole.peers(1234, {Axis::kExpertDp}), progression(1042, 64, 8));
}

TEST(DeviceMesh, DescribesGroups) {
  const DeviceMesh small({.dp_replicate = 2, .tp = 2, .ep = 2}, 4);
  EXPECT_EQ(small.describe_groups(Axis::kDpReplicate), "{0,2} {1,3}");
  EXPECT_EQ(small.describe_groups(Axis::kEp), "{0,1} {2,3}");
  const DeviceMesh large({.dp_replicate = 16, .tp = 2}, 32);
  EXPECT_EQ(large.describe_groups(Axis::kTp), "16 of 2, the first {0,1}");
}

TEST(DeviceMesh, Describes) {
  const DeviceMesh mesh({.dp_shard = 2, .tp = 4}, 8);
  EXPECT_EQ(mesh.describe(),
            "pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 4 = 8");
  EXPECT_EQ(mesh.describe(6), "dp_shard=1 tp=2");
  Degrees degrees{.dp_replicate = 2, .dp_shard = 2, .ep = 2};
  const std::string ranks =
      "pp 1 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 1 = 4, experts ";
  EXPECT_EQ(DeviceMesh(degrees, 4).describe(),
            ranks + "expert_dp 2 x ep 2 x etp 1");
  degrees.expert_replicate = 2;
  EXPECT_EQ(DeviceMesh(degrees, 4).describe(),
            ranks + "expert_replicate 2 x expert_dp 1 x ep 2 x etp 1");
  EXPECT_EQ(DeviceMesh().describe(0), "");
  EXPECT_EQ(DeviceMesh().world_size(), 1);
}

TEST(DeviceMesh, RefusesWhatDoesNotFit) {
  EXPECT_EQ(refusal({.pp = 2, .tp = 2}, 8),
            "mesh: pp 2 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 = 4, but "
            "the world has 8 ranks. Start 4 ranks, or change mesh.pp or "
            "mesh.tp.");
  EXPECT_EQ(refusal({.tp = 0}, 1), "mesh.tp is 0. A degree is at least 1.");
  EXPECT_EQ(refusal({.cp = -2}, 1), "mesh.cp is -2. A degree is at least 1.");
  EXPECT_EQ(refusal({.pp = int64_t{1} << 40, .tp = int64_t{1} << 40}, 1),
            "mesh: pp 1099511627776 x dp_replicate 1 x dp_shard 1 x cp 1 x tp "
            "1099511627776 = over 2^63, but the world has 1 ranks. Start fewer "
            "ranks, or change mesh.pp or mesh.tp.");
  EXPECT_EQ(refusal({.dp_shard = 4, .ep = 3}, 4),
            "mesh.ep is 3, which does not divide the dp_replicate 1 x dp_shard "
            "4 x cp 1 x tp 1 = 4 ranks of a stage over etp 1. Use a divisor of "
            "4.");
  EXPECT_EQ(refusal({.tp = 4, .etp = 2}, 4),
            "mesh.etp is 2. It is 1 (an expert is whole on its rank) or "
            "mesh.tp, 4.");
  EXPECT_NE(refusal({.ep = 0}, 1), "");
}

TEST(Axis, Names) {
  for (Axis axis : kAxes) EXPECT_EQ(axis_named(name_of(axis)), axis);
  EXPECT_STREQ(name_of(Axis::kExpertDp), "expert_dp");
  EXPECT_THROW(axis_named("ep"), Error);
  EXPECT_THROW(axis_named(""), Error);
}

TEST(DeviceMesh, DataRanksCountInTheOrderOfTheMesh) {
  const Degrees degrees{.pp = 2, .dp_replicate = 2, .dp_shard = 3, .tp = 2};
  const std::vector<Axis> data = {Axis::kDpReplicate, Axis::kDpShard};
  for (const std::vector<Axis>& order :
       {std::vector<Axis>{},
        {Axis::kDpShard, Axis::kTp, Axis::kDpReplicate, Axis::kPp,
         Axis::kCp}}) {
    const DeviceMesh mesh(degrees, 24, order);
    for (int64_t rank = 0; rank < 24; ++rank) {
      const auto peers = mesh.peers(rank, data);
      EXPECT_EQ(peers.at(mesh.data_rank_of(mesh.coord_of(rank))), rank);
    }
  }
}

}  // namespace
}  // namespace tessera::mesh
