/* `RowIndex.find`, id by id, where NumPy makes one pass over all ids for each operation. Both find the same rows.
   index.py explains entries and marks, `compiled_find` in __init__.py the arguments. */

#include <stdint.h>

enum { BUCKET = 4, AT_ONCE = 256 };

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
static const uint32_t ENTRY = 0x7FFFFFFFu, FREE = 0xFFFFFFFFu;

typedef struct {
    const uint32_t *entries;
    uint64_t num_buckets;
    uint32_t number_bits, num_numbers;
    const int64_t *ids;
} Index;

/* Search for the row of an id, from its first bucket; -1 if it has none. */
static int64_t search(const Index *index, int64_t id, uint64_t bucket, uint32_t mark) {
    for (;; bucket = (bucket + 1) & (index->num_buckets - 1)) {
        const uint32_t *entries = index->entries + bucket * BUCKET;
        for (int place = 0; place < BUCKET; place++) {
            if (entries[place] == FREE)
                return -1;
            uint32_t row = entries[place] ^ mark;
            if (row < index->num_numbers && index->ids[row] == id)
                return row;
        }
    }
}

/* Find a batch of ids; memory that one id needs is prefetched while others are worked on. */
static void find_some(const Index *index, const int64_t *ids, int num_ids, int64_t *rows) {
    uint64_t buckets[AT_ONCE];
    uint32_t marks[AT_ONCE], found[AT_ONCE];
    unsigned shift = 64 - (unsigned)__builtin_ctzll(index->num_buckets);
    for (int each = 0; each < num_ids; each++) {
        uint64_t hashed = (uint64_t)ids[each] * GOLDEN;
        buckets[each] = hashed >> shift;
        marks[each] = (uint32_t)((hashed >> 32) << index->number_bits) & ENTRY;
        __builtin_prefetch(index->entries + buckets[each] * BUCKET);
    }
    for (int each = 0; each < num_ids; each++) {
        const uint32_t *entries = index->entries + buckets[each] * BUCKET;
        uint32_t row = UINT32_MAX;
        for (int place = 0; place < BUCKET; place++) {
            uint32_t beside = entries[place] ^ marks[each];
            row = beside < row ? beside : row;
        }
        found[each] = row;
        if (row < index->num_numbers)
            __builtin_prefetch(index->ids + row);
    }
    for (int each = 0; each < num_ids; each++)
        if (found[each] < index->num_numbers && index->ids[found[each]] == ids[each])
            rows[each] = found[each];
        else
            rows[each] = search(index, ids[each], buckets[each], marks[each]);
}

void fleet_find_rows(const uint32_t *entries, uint64_t num_buckets, uint32_t number_bits,
                     const int64_t *of_rows, const int64_t *ids, int64_t num_ids, int64_t *rows) {
    Index index = {entries, num_buckets, number_bits, UINT32_C(1) << number_bits, of_rows};
    for (int64_t begin = 0; begin < num_ids; begin += AT_ONCE) {
        int64_t left = num_ids - begin;
        find_some(&index, ids + begin, left < AT_ONCE ? (int)left : AT_ONCE, rows + begin);
    }
}
