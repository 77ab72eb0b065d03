#include "tessera/mesh/layout.h"

#include <gtest/gtest.h>

#include <set>

namespace tessera::mesh {
namespace {

using Shape = std::vector<int64_t>;

// How often each element of the global tensor lies in a box of the ranks that
// `counts` accepts.
template <typename Counts>
std::vector<int> coverage(const Layout& layout, const DeviceMesh& mesh,
                          Counts counts) {
  const Shape& shape = layout.global_shape();
  std::vector<int> times(static_cast<size_t>(layout.global_numel()));
  for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
    const Coord coord = mesh.coord_of(rank);
    if (!counts(coord)) continue;
    const Box box = layout.local_box(mesh, coord);
    for (size_t i = 0; i < times.size(); ++i) {
      bool inside = true;
      auto rest = static_cast<int64_t>(i);
      for (size_t dim = shape.size(); dim-- > 0;) {
        const int64_t at = rest % shape[dim];
        rest /= shape[dim];
        inside = inside && at >= box.offset[dim] &&
                 at < box.offset[dim] + box.size[dim];
      }
      times[i] += inside ? 1 : 0;
    }
  }
  return times;
}

void expect_all(const std::vector<int>& times, int64_t expected,
                const Layout& layout) {
  for (int each : times) ASSERT_EQ(each, expected) << layout.describe();
}

TEST(Chunk, UnevenAndEmpty) {
  const auto sizes = [](int64_t n, int64_t pieces) {
    Shape sizes;
    int64_t end = 0;
    for (int64_t i = 0; i < pieces; ++i) {
      const Range range = chunk_of(n, pieces, i);
      EXPECT_EQ(range.begin, end);
      end = range.end;
      sizes.push_back(range.size());
    }
    EXPECT_EQ(end, n);
    return sizes;
  };
  EXPECT_EQ(sizes(1000, 3), (Shape{334, 334, 332}));
  EXPECT_EQ(sizes(10, 4), (Shape{3, 3, 3, 1}));
  EXPECT_EQ(sizes(5, 4), (Shape{2, 2, 1, 0}));
  EXPECT_EQ(sizes(3, 5), (Shape{1, 1, 1, 0, 0}));
  EXPECT_EQ(sizes(0, 2), (Shape{0, 0}));
  EXPECT_EQ(sizes(8, 1), (Shape{8}));
}

// Two linear layers of 1024 x 4096 and 4096 x 10 in dim-0 shards: the largest
// rank holds the figures of the worked example.
TEST(Layout, LargestShardOfTheWorkedExample) {
  const auto largest = [](int64_t degree) {
    const DeviceMesh mesh({.dp_shard = degree}, degree);
    int64_t most = 0;
    for (int64_t rank = 0; rank < degree; ++rank) {
      int64_t elements = 0;
      for (const Shape& shape :
           {Shape{4096, 1024}, Shape{4096}, Shape{10, 4096}, Shape{10}}) {
        elements += Layout(shape)
                        .with(Axis::kDpShard, Placement::shard(0))
                        .local_box(mesh, mesh.coord_of(rank))
                        .numel();
      }
      most = std::max(most, elements);
    }
    return most;
  };
  EXPECT_EQ(largest(1), 4239370);
  EXPECT_EQ(largest(2), 2119685);
  EXPECT_EQ(largest(4), 1061891);
  EXPECT_EQ(largest(8), 532994);
}

TEST(Layout, DpShardCutsInsideTheBoxThatTpLeft) {
  const DeviceMesh mesh({.dp_shard = 2, .tp = 2}, 4);
  const Layout layout = Layout({10, 4})
                            .with(Axis::kTp, Placement::shard(0))
                            .with(Axis::kDpShard, Placement::shard(0));
  const auto box = [&](int64_t dp, int64_t tp) {
    Coord coord;
    coord[Axis::kDpShard] = dp;
    coord[Axis::kTp] = tp;
    return layout.local_box(mesh, coord);
  };
  EXPECT_EQ(box(0, 0), (Box{{0, 0}, {3, 4}}));
  EXPECT_EQ(box(1, 0), (Box{{3, 0}, {2, 4}}));
  EXPECT_EQ(box(0, 1), (Box{{5, 0}, {3, 4}}));
  EXPECT_EQ(box(1, 1), (Box{{8, 0}, {2, 4}}));
}

// Every mesh of up to three axes above 1, every placement on them: the owners'
// boxes tile the tensor, and the boxes of all ranks cover it evenly.
TEST(Layout, OwnersTileTheTensor) {
  const std::vector<Shape> shapes = {{7}, {5, 3}, {2, 3, 4}, {1, 9}, {}};
  const std::vector<Placement> choices = {
      Placement::replicate(), Placement::shard(0), Placement::shard(1)};
  for (const Degrees& degrees :
       {Degrees{}, Degrees{.dp_shard = 4}, Degrees{.dp_shard = 3, .tp = 2},
        Degrees{.dp_replicate = 2, .dp_shard = 2, .tp = 4},
        Degrees{.dp_replicate = 2, .cp = 2, .tp = 3}}) {
    const int64_t world =
        degrees.dp_replicate * degrees.dp_shard * degrees.cp * degrees.tp;
    const DeviceMesh mesh(degrees, world);
    for (const Shape& shape : shapes) {
      const auto dims = static_cast<int64_t>(shape.size());
      for (const Placement& on_tp : choices) {
        for (const Placement& on_shard : choices) {
          if (on_tp.dim >= dims || on_shard.dim >= dims) continue;
          const Layout layout = Layout(shape)
                                    .with(Axis::kTp, on_tp)
                                    .with(Axis::kDpShard, on_shard);
          const int64_t copies =
              world / ((on_tp.is_shard() ? degrees.tp : 1) *
                       (on_shard.is_shard() ? degrees.dp_shard : 1));
          expect_all(coverage(layout, mesh, [](const Coord&) { return true; }),
                     copies, layout);
          expect_all(coverage(layout, mesh,
                              [&](const Coord& coord) {
                                return layout.owned_by(coord);
                              }),
                     1, layout);
        }
      }
    }
  }
}

TEST(Layout, OfMoreRanksThanRowsHasEmptyShards) {
  const DeviceMesh mesh({.dp_shard = 5}, 5);
  const Layout layout =
      Layout({3, 2}).with(Axis::kDpShard, Placement::shard(0));
  EXPECT_EQ(layout.local_shape(mesh, mesh.coord_of(2)), (Shape{1, 2}));
  EXPECT_EQ(layout.local_shape(mesh, mesh.coord_of(3)), (Shape{0, 2}));
  EXPECT_TRUE(layout.local_box(mesh, mesh.coord_of(4)).empty());
}

// Two key/value heads over four tensor-parallel ranks: neighbours hold the same
// one, the first of them owns it, and both compute a part of its gradient.
TEST(Layout, CopiesOfAPiece) {
  const DeviceMesh mesh({.dp_replicate = 2, .tp = 4}, 8);
  const Layout layout =
      Layout({6, 2})
          .with(Axis::kTp, Placement::shard(0, /*copies=*/2))
          .with(Axis::kDpReplicate, Placement::replicate_summed());
  for (int64_t rank = 0; rank < 8; ++rank) {
    const Coord coord = mesh.coord_of(rank);
    const Box box = layout.local_box(mesh, coord);
    EXPECT_EQ(box.offset[0], coord[Axis::kTp] < 2 ? 0 : 3);
    EXPECT_EQ(box.size, (Shape{3, 2}));
    EXPECT_EQ(layout.owned_by(coord), rank == 0 || rank == 2);
  }
  EXPECT_EQ(layout.gradient_peers(mesh, 1), (Shape{0, 1, 4, 5}));
  EXPECT_EQ(layout.gradient_peers(mesh, 6), (Shape{2, 3, 6, 7}));
}

// A tied embedding: held by the first stage and the last.
TEST(Layout, OnStages) {
  const DeviceMesh mesh({.pp = 3, .dp_replicate = 1, .dp_shard = 2}, 6);
  const Layout layout = Layout({4, 2}).on_stages({0, 2}).with(
      Axis::kDpShard, Placement::shard(0));
  EXPECT_TRUE(layout.local_box(mesh, mesh.coord_of(2)).empty());
  EXPECT_EQ(layout.local_box(mesh, mesh.coord_of(5)), (Box{{2, 0}, {2, 2}}));
  EXPECT_TRUE(layout.owned_by(mesh.coord_of(1)));
  EXPECT_FALSE(layout.owned_by(mesh.coord_of(3)));
  EXPECT_FALSE(layout.owned_by(mesh.coord_of(5)));
  EXPECT_EQ(layout.gradient_peers(mesh, 1), (Shape{1, 5}));
}

// Of a parameter that is cut over dp_shard the other axes remain.
TEST(Layout, GradientPeers) {
  const DeviceMesh mesh({.dp_replicate = 2, .dp_shard = 2, .cp = 2}, 8);
  const Layout layout =
      Layout({4})
          .with(Axis::kDpReplicate, Placement::replicate_summed())
          .with(Axis::kCp, Placement::replicate_summed());
  EXPECT_EQ(
      layout.with(Axis::kDpShard, Placement::shard(0)).gradient_peers(mesh, 2),
      (Shape{2, 3, 6, 7}));
  EXPECT_EQ(layout.with(Axis::kDpShard, Placement::replicate_summed())
                .gradient_peers(mesh, 2)
                .size(),
            8U);
}

// What gradient_peers() says, by asking every rank: the definition.
Shape peers_by_walk(const Layout& layout, const DeviceMesh& mesh,
                    int64_t rank) {
  const Coord mine = mesh.coord_of(rank);
  const auto holds = [&](const Coord& other, Axis axis) {
    const Placement placement = layout.on(axis);
    if (other[axis] == mine[axis]) return true;
    return placement.summed &&
           (!placement.is_shard() ||
            other[axis] / placement.copies == mine[axis] / placement.copies);
  };
  Shape peers;
  for (int64_t each = 0; each < mesh.world_size(); ++each) {
    const Coord other = mesh.coord_of(each);
    bool is_peer = layout.held_by(other);
    for (Axis axis : layout.is_of_expert()
                         ? std::vector{Axis::kEp, Axis::kEtp, Axis::kExpertDp,
                                       Axis::kExpertReplicate}
                         : std::vector{Axis::kTp, Axis::kCp, Axis::kDpShard,
                                       Axis::kDpReplicate}) {
      is_peer = is_peer && holds(other, axis);
    }
    if (is_peer) peers.push_back(each);
  }
  return peers;
}

// The placements that an axis of this degree can have.
std::vector<Placement> choices_of(int64_t degree) {
  if (degree == 1) return {Placement::replicate()};
  std::vector<Placement> choices = {Placement::replicate(),
                                    Placement::replicate_summed(),
                                    Placement::shard(0)};
  if (degree % 2 == 0) choices.push_back(Placement::shard(0, degree / 2));
  return choices;
}

// Calls act(layout) for all placements of `axes`, on all stages, on one, and on
// the two of a tied embedding.
template <typename Act>
void for_each_layout(const DeviceMesh& mesh, const Layout& plain,
                     const std::vector<Axis>& axes, Act act) {
  const int64_t last = mesh.degree(Axis::kPp) - 1;
  std::vector<Layout> layouts = {plain};
  if (last > 0) {
    layouts.push_back(plain.on_stages({last}));
    layouts.push_back(plain.on_stages({0, last}));
  }
  for (Axis axis : axes) {
    std::vector<Layout> more;
    for (const Layout& layout : layouts) {
      for (const Placement& placement : choices_of(mesh.degree(axis))) {
        more.push_back(layout.with(axis, placement));
      }
    }
    layouts = std::move(more);
  }
  for (const Layout& layout : layouts) act(layout);
}

// Every mesh of up to 16 ranks, in both views of it.
template <typename Act>
void for_each_mesh(Act act) {
  for (int64_t world = 1; world <= 16; ++world) {
    const auto divides = [&](int64_t product) { return world % product == 0; };
    for (int64_t pp = 1; pp <= world; ++pp) {
      for (int64_t r = 1; divides(pp) && r <= world / pp; ++r) {
        for (int64_t s = 1; divides(pp * r) && s <= world / (pp * r); ++s) {
          for (int64_t cp = 1; cp <= world / (pp * r * s); ++cp) {
            if (!divides(pp * r * s * cp)) continue;
            const int64_t tp = world / (pp * r * s * cp);
            for (int64_t etp : std::set<int64_t>{1, tp}) {
              const int64_t foldable = world / pp / etp;
              for (int64_t ep = 1; ep <= foldable; ++ep) {
                if (foldable % ep != 0) continue;
                Degrees degrees{pp, r, s, cp, tp, ep, etp};
                act(DeviceMesh(degrees, world));
                if (r == 1 || foldable / r % ep != 0) continue;
                degrees.expert_replicate = r;
                act(DeviceMesh(degrees, world));
              }
            }
          }
        }
      }
    }
  }
}

TEST(Layout, GradientPeersAreThoseOfAWalkOverTheWorld) {
  int64_t cases = 0;
  for_each_mesh([&](const DeviceMesh& mesh) {
    const auto compare = [&](const Layout& layout) {
      for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
        ASSERT_EQ(layout.gradient_peers(mesh, rank),
                  peers_by_walk(layout, mesh, rank))
            << layout.describe() << " of rank " << rank << " on "
            << mesh.describe();
        ++cases;
      }
    };
    const bool first = mesh.degree(Axis::kEp) * mesh.degree(Axis::kEtp) *
                           mesh.degree(Axis::kExpertReplicate) ==
                       1;
    if (first) {  // the other views of these ranks are the same to it
      for_each_layout(
          mesh, Layout({32, 2}),
          {Axis::kTp, Axis::kCp, Axis::kDpShard, Axis::kDpReplicate}, compare);
    }
    for_each_layout(
        mesh, Layout({32, 2}, View::kExperts),
        {Axis::kEp, Axis::kEtp, Axis::kExpertDp, Axis::kExpertReplicate},
        compare);
  });
  EXPECT_GT(cases, 100000);
}

// A hundred thousand ranks, whose peers along some axes are few.
TEST(Layout, GradientPeersOfALargeWorld) {
  const DeviceMesh mesh(
      {.pp = 16, .dp_replicate = 25, .dp_shard = 32, .tp = 8, .ep = 16},
      16 * 25 * 32 * 8);
  const Layout layout =
      Layout({64, 64})
          .with(Axis::kDpReplicate, Placement::replicate_summed())
          .with(Axis::kDpShard, Placement::shard(0))
          .on_stages({3});
  for (int64_t i = 0; i < 10000; ++i) {
    ASSERT_EQ(layout.gradient_peers(mesh, 3 * 6400 + i % 6400).size(), 25U);
  }
}

// Two experts, one for each coord of ep, each cut over etp and then over the
// ranks that hold it.
TEST(Layout, OfAnExpert) {
  const DeviceMesh mesh({.dp_replicate = 4, .tp = 2, .ep = 2, .etp = 2}, 8);
  const Layout held =
      Layout({2, 6, 2}, View::kExperts).with(Axis::kEp, Placement::shard(0));
  const Layout copied =
      held.with(Axis::kEtp, Placement::shard(1))
          .with(Axis::kExpertDp, Placement::replicate_summed());
  // Ranks of ep 1 are 2, 3, 6, 7; 2 and 6 have the same half.
  EXPECT_EQ(copied.local_box(mesh, mesh.coord_of(0)),
            (Box{{0, 0, 0}, {1, 3, 2}}));
  EXPECT_EQ(copied.local_box(mesh, mesh.coord_of(6)),
            (Box{{1, 0, 0}, {1, 3, 2}}));
  EXPECT_EQ(copied.local_box(mesh, mesh.coord_of(7)),
            (Box{{1, 3, 0}, {1, 3, 2}}));
  EXPECT_EQ(copied.gradient_peers(mesh, 2), (Shape{2, 6}));
  EXPECT_TRUE(copied.owned_by(mesh.coord_of(2)));
  EXPECT_FALSE(copied.owned_by(mesh.coord_of(6)));
  EXPECT_TRUE(copied.owned_by(mesh.coord_of(0)));  // of the other expert

  const Layout cut =
      copied.with(copied.data_axis(), Placement::shard(copied.data_dim()));
  EXPECT_EQ(cut.data_axis(), Axis::kExpertDp);
  EXPECT_EQ(cut.local_box(mesh, mesh.coord_of(3)), (Box{{1, 3, 0}, {1, 2, 2}}));
  EXPECT_EQ(cut.local_box(mesh, mesh.coord_of(7)), (Box{{1, 5, 0}, {1, 1, 2}}));
  EXPECT_TRUE(cut.owned_by(mesh.coord_of(7)));
  EXPECT_EQ(cut.gradient_peers(mesh, 3), (Shape{3}));
  EXPECT_EQ(cut.describe(),
            "[2, 6, 2] ep: shard(0), etp: shard(1), expert_dp: shard(1)");
}

// As dense parameters under hybrid sharding: cut inside a replica, and a copy
// in each.
TEST(Layout, OfAnExpertInsideItsReplica) {
  const DeviceMesh mesh(
      {.dp_replicate = 2, .dp_shard = 4, .ep = 2, .expert_replicate = 2}, 8);
  const Layout whole =
      Layout({2, 6, 2}, View::kExperts).with(Axis::kEp, Placement::shard(0));
  EXPECT_EQ(whole.replica_axis(), Axis::kExpertReplicate);
  EXPECT_EQ(Layout({6, 2}).replica_axis(), Axis::kDpReplicate);
  const Layout cut =
      whole.with(whole.data_axis(), Placement::shard(whole.data_dim()))
          .with(whole.replica_axis(), Placement::replicate_summed());
  // Of the first replica, ranks 0 to 3, 1 and 3 have the second expert.
  EXPECT_EQ(cut.local_box(mesh, mesh.coord_of(3)), (Box{{1, 3, 0}, {1, 3, 2}}));
  EXPECT_EQ(cut.local_box(mesh, mesh.coord_of(7)), (Box{{1, 3, 0}, {1, 3, 2}}));
  EXPECT_EQ(mesh.peers(3, {cut.data_axis()}), (Shape{1, 3}));
  EXPECT_EQ(cut.gradient_peers(mesh, 3), (Shape{3, 7}));
  EXPECT_TRUE(cut.owned_by(mesh.coord_of(3)));
  EXPECT_FALSE(cut.owned_by(mesh.coord_of(7)));
  EXPECT_EQ(cut.describe(),
            "[2, 6, 2] ep: shard(0), expert_dp: shard(1), expert_replicate: "
            "replicate summed");
}

TEST(Box, Intersections) {
  const Box a{{0, 2}, {4, 5}};
  EXPECT_EQ(intersect(a, a), a);
  EXPECT_EQ(intersect(a, {{2, 0}, {4, 4}}), (Box{{2, 2}, {2, 2}}));
  EXPECT_TRUE(intersect(a, {{4, 2}, {1, 5}}).empty());
  EXPECT_TRUE(intersect(a, {{9, 9}, {1, 1}}).empty());
  EXPECT_TRUE(intersect(a, {{0, 2}, {0, 5}}).empty());
  EXPECT_EQ(intersect(Box{}, Box{}).numel(), 1);
}

// The common parts of one mesh's boxes with another's tile the tensor too: what
// resharding copies.
TEST(Box, TwoMeshesMeetInTiles) {
  const Layout rows = Layout({7, 6}).with(Axis::kDpShard, Placement::shard(0));
  const Layout nested = rows.with(Axis::kTp, Placement::shard(1));
  const DeviceMesh from({.dp_shard = 3}, 3), to({.dp_shard = 2, .tp = 4}, 8);
  int64_t elements = 0;
  for (int64_t source = 0; source < 3; ++source) {
    for (int64_t target = 0; target < 8; ++target) {
      elements += intersect(rows.local_box(from, from.coord_of(source)),
                            nested.local_box(to, to.coord_of(target)))
                      .numel();
    }
  }
  EXPECT_EQ(elements, 42);
}

TEST(Layout, DescribesAndCompares) {
  const Layout plain({512, 64});
  EXPECT_EQ(plain.describe(), "[512, 64]");
  const Layout cut = plain.with(Axis::kDpShard, Placement::shard(0))
                         .with(Axis::kTp, Placement::shard(1))
                         .with(Axis::kCp, Placement::replicate_summed());
  EXPECT_EQ(cut.describe(),
            "[512, 64] tp: shard(1), cp: replicate summed, dp_shard: shard(0)");
  EXPECT_EQ(plain.with(Axis::kTp, Placement::shard(0, 2))
                .on_stages({0, 3})
                .describe(),
            "[512, 64] tp: shard(0, 2 copies) summed, stages 0 3");
  EXPECT_NE(plain, cut);
  EXPECT_EQ(cut.with(Axis::kDpShard, Placement::replicate())
                .with(Axis::kTp, Placement::replicate())
                .with(Axis::kCp, Placement::replicate()),
            plain);
  EXPECT_EQ(plain.global_numel(), 512 * 64);
  EXPECT_EQ(Layout(Shape{}).global_numel(), 1);
}

}  // namespace
}  // namespace tessera::mesh
