// What the kernel is called with. structs.py mirrors these structs.
#pragma once
#include <cstdint>

// A tensor [rows, heads, groups, ...]: its first element, and bytes from one row, head and group to the next.
struct Plane {
  const uint8_t* data;
  int64_t row, head, group;

  const uint8_t* at(int64_t b, int64_t h, int64_t g) const {
    return data ? data + b * row + h * head + g * group : nullptr;
  }
};

// Keys or values: stored[t][c] * scale[t][c / block] + zero[t][c / block], or by the channel with scale[c] and zero[c];
// then times `rotation`, plus mean[c]. Rows of codes lie `stride` bytes apart, those of third bits `high_stride`.
struct Store {
  int32_t form, bits, dim, block, is_columns, unused;
  int64_t stride, high_stride;
  Plane codes, high, scale, zero, mean;
  const float* table;     // [16]
  const float* rotation;  // [dim, dim]
};

// Consecutive tokens, or units of `unit` tokens that lie anywhere. Token `i` of row `b` is slot `first_slot[b] + i` of the
// mask, and is seen below slot `stop` only.
struct Segment {
  Store key, value;
  const int64_t* ids;  // [rows, heads or 1, units]: where each unit lies, or null: in order
  int64_t ids_row, ids_head;
  int64_t unit, group_length, length;  // unit `id` is a part of group `id * unit / group_length`; all in tokens
  const int64_t* slots;                // as `ids`: the first slot of each unit, or less than 0: not seen; or null
  const float* scores;                 // [rows, heads, queries, scores_row], scaled, or null: by the keys
  int64_t scores_row;
  const int64_t* first_slot;           // [rows], or null: `slot`
  int64_t slot, stop;
  int64_t hides_sinks, ignores_mask;
  const int64_t* lengths;  // [rows, heads], none above `length`: how many tokens each has, or null: `length`

  const int64_t* of(const int64_t* all, int64_t b, int64_t h) const {
    return all ? all + b * ids_row + h * ids_head : nullptr;
  }
};

struct Call {
  int64_t rows, heads, queries, num_segments, num_threads;
  Segment* segments;
  const float* query;  // [rows, heads, queries, key dim]
  float scaling;
  int32_t mask_is_additive;
  const void* mask;  // [rows, slots], bytes or floats, or null
  int64_t mask_stride;
  const int64_t* sinks;  // [rows]: first slot of the `num_sinks` tokens that segments with `hides_sinks` leave out
  int64_t num_sinks;
  float* output;  // [rows, heads, queries, value dim]
};

// How the queries that units are estimated with come from those of the attention.
struct Estimate {
  Store key;            // summaries, one a unit
  const int64_t* ids;   // [rows, N]: where each slot of `per_slot` summaries lies
  int64_t ids_row, per_slot;
  const float* query;   // [rows, heads, queries, dim], scaled, or null: the attention's own
  const float* mean;    // [rows, heads, dim]: their product with a query is added to its scores, or null
  float added, spread;  // added to all scores; of bounds
  int32_t has_bounds;   // the key is the largest and the smallest value of each channel
  int32_t rounds;       // queries are rotated as the key, if it is, then rounded to 8 bits
};

// Which units of tokens the last segment of `attention` reads, or the last but one before the rest: those of the largest
// estimated mass.
struct Choice {
  Call* attention;  // all other segments are read anyway: what they have of the attention is left for no unit
  Estimate estimate;
  int64_t unit, num_units;             // tokens a unit; units a row that are chosen from
  const int64_t* first_sink;           // [rows]: slot, or null: 0
  int64_t num_sinks, sinks_are_apart;  // units with sinks are not chosen; if sinks are stored apart, those of sinks alone
  const int64_t* blocks;   // [rows, N]: unit `i` lies at `blocks[i / block_units] * block_units + i % block_units`
  int64_t blocks_row, block_units;
  int64_t count, is_mean;  // units to choose, at most; query heads agree by the mean of their shares, else the largest
  double top_p;            // choose until what is read has this share of the estimated attention, or 0: choose `count`
  int64_t *ids, *slots;    // [rows, heads, count]: where the chosen units lie, in order, and their first slots, or -1
  float* scores;           // [rows, heads, queries, count] of the chosen units, or null
  float* rest;             // [rows, heads, queries], or null: the score of the last segment, a token that stands for all
  double rest_share;       // units that are not read, with this share of their estimated mass
  int64_t taken;           // written: units of the row and head that has the most; the others are filled up to it
};

// Where the rows of a table lie: row `i` of sequence `b` is `ids[b][i / block] * block + i % block`, in each head.
struct Places {
  const int64_t* ids;
  int64_t ids_row, block;
};

// Which clusters of tokens the last segment but one of `attention` reads, member by member. The last segment are the
// clusters, each as one token, of which those count that are not read.
struct ClusterChoice {
  Call* attention;  // all other segments are read anyway
  Estimate estimate;  // of mean keys
  int64_t num_clusters, scores_row;
  Places clusters, members, tokens;
  const int32_t *begins, *sizes;  // of each head's clusters: where their members begin, and how many there are
  const float *masses, *radii;    // what is added to the score of a mean key, and the farthest a member is from it
  const int32_t* member;          // of each head: tokens, cluster by cluster
  int64_t cluster_head, member_head;  // elements from one head to the next
  double spread;      // share of the radius by which a cluster is nearer to the query when it is chosen
  int64_t count;      // tokens to read, at most
  int64_t is_mean;    // query heads agree by the mean of their shares, else the largest
  double top_p;       // read until what is read has this share of the estimated attention, or 0: `count` tokens
  int64_t *ids, *lengths;  // [rows, heads, count] and [rows, heads]: where the members lie that are read, how many
  float* scores;      // [rows, heads, queries, scores_row]: of the clusters, -inf for those that are read
};
