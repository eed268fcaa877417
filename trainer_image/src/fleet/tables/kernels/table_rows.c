/* What a table does with many rows, id by id, where NumPy and torch make one pass over all of them for each
   operation. All find the same rows, and step them to the same bits. index.py explains entries and marks,
   `RowAddresses` in __init__.py the members of `Rows`. */

#include <stdint.h>

enum { BUCKET = 4, AT_ONCE = 256, AHEAD = 8 }; /* rows are prefetched this many ahead */

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
static const uint32_t ENTRY = 0x7FFFFFFFu, FREE = 0xFFFFFFFFu;

typedef struct {
    const uint32_t *entries;
    const int64_t *ids;
    const int32_t *direct;
    float *words;
    uint64_t size;
    int64_t width;
    uint32_t number_bits;
} Rows;

/* Search for the row of an id, from its first bucket; -1 if it has none. */
static int64_t search(const Rows *table, int64_t id, uint64_t bucket, uint32_t mark) {
    uint32_t num_numbers = UINT32_C(1) << table->number_bits;
    for (;; bucket = (bucket + 1) & (table->size - 1)) {
        const uint32_t *entries = table->entries + bucket * BUCKET;
        for (int place = 0; place < BUCKET; place++) {
            if (entries[place] == FREE)
                return -1;
            uint32_t row = entries[place] ^ mark;
            if (row < num_numbers && table->ids[row] == id)
                return row;
        }
    }
}

/* Find a batch of ids by their hashes; memory that one id needs is prefetched while others are worked on. */
static void find_some(const Rows *table, const int64_t *ids, int num_ids, int64_t *numbers) {
    uint64_t buckets[AT_ONCE];
    uint32_t marks[AT_ONCE], found[AT_ONCE], num_numbers = UINT32_C(1) << table->number_bits;
    unsigned shift = 64 - (unsigned)__builtin_ctzll(table->size);
    for (int each = 0; each < num_ids; each++) {
        uint64_t hashed = (uint64_t)ids[each] * GOLDEN;
        buckets[each] = hashed >> shift;
        marks[each] = (uint32_t)((hashed >> 32) << table->number_bits) & ENTRY;
        __builtin_prefetch(table->entries + buckets[each] * BUCKET);
    }
    for (int each = 0; each < num_ids; each++) {
        const uint32_t *entries = table->entries + buckets[each] * BUCKET;
        uint32_t number = UINT32_MAX;
        for (int place = 0; place < BUCKET; place++) {
            uint32_t beside = entries[place] ^ marks[each];
            number = beside < number ? beside : number;
        }
        found[each] = number;
        if (number < num_numbers)
            __builtin_prefetch(table->ids + number);
    }
    for (int each = 0; each < num_ids; each++)
        if (found[each] < num_numbers && table->ids[found[each]] == ids[each])
            numbers[each] = found[each];
        else
            numbers[each] = search(table, ids[each], buckets[each], marks[each]);
}

/* Find the numbers of rows, -1 for an id without one; return how many ids have none. */
int64_t fleet_find_rows(const Rows *table, const int64_t *ids, int64_t num_ids, int64_t *numbers) {
    int64_t missing = 0;
    for (int64_t begin = 0; begin < num_ids; begin += AT_ONCE) {
        int64_t end = num_ids - begin < AT_ONCE ? num_ids : begin + AT_ONCE;
        if (!table->direct)
            find_some(table, ids + begin, (int)(end - begin), numbers + begin);
        for (int64_t each = begin; each < end; each++) {
            if (table->direct)
                numbers[each] = (uint64_t)ids[each] < table->size ? table->direct[ids[each]] : -1;
            missing += numbers[each] < 0;
        }
    }
    return missing;
}

static void prefetch(const float *row, int64_t num_words) {
    for (int64_t word = 0; word < num_words; word += 16)
        __builtin_prefetch(row + word, 1);
}

/* Find rows, and copy the first words of each; those of ids without a row are not written. */
int64_t fleet_read_rows(const Rows *table, const int64_t *ids, int64_t num_ids, int64_t *numbers, float *words,
                        int64_t num_words) {
    int64_t missing = 0;
    for (int64_t begin = 0; begin < num_ids; begin += AT_ONCE) {
        int64_t end = num_ids - begin < AT_ONCE ? num_ids : begin + AT_ONCE;
        missing += fleet_find_rows(table, ids + begin, end - begin, numbers + begin);
        for (int64_t each = begin; each < end; each++) {
            if (each + AHEAD < end && numbers[each + AHEAD] >= 0)
                prefetch(table->words + numbers[each + AHEAD] * table->width, num_words);
            if (numbers[each] < 0)
                continue;
            const float *row = table->words + numbers[each] * table->width;
            for (int64_t word = 0; word < num_words; word++)
                words[each * num_words + word] = row[word];
        }
    }
    return missing;
}

/* torch's `add_` rounds product and sum at once where it uses the processor's instructions for that, and each by
   itself elsewhere. */
static inline __attribute__((always_inline)) float product_sum(float left, float right, float sum, int fused) {
    return fused ? __builtin_fmaf(left, right, sum) : left * right + sum;
}

static inline __attribute__((always_inline)) int64_t step_rows(const Rows *table, const int64_t *ids,
                                                               int64_t num_ids, int64_t *numbers,
                                                               const float *gradients, float *before,
                                                               int64_t dimension, double rate, double decay,
                                                               int32_t step, int fused) {
    int64_t missing = fleet_find_rows(table, ids, num_ids, numbers);
    if (missing)
        return missing;
    for (int64_t each = 0; each < num_ids; each++) {
        if (each + AHEAD < num_ids)
            prefetch(table->words + numbers[each + AHEAD] * table->width, table->width);
        float *restrict row = table->words + numbers[each] * table->width;
        const float *restrict gradient = gradients + each * dimension;
        if (before)
            __builtin_memcpy(before + each * dimension, row, sizeof(float) * (uint64_t)dimension);
        if (decay != 0.0)
            for (int64_t column = 0; column < dimension; column++) {
                float decayed = product_sum(row[column], (float)decay, gradient[column], fused);
                row[column] = product_sum(decayed, (float)-rate, row[column], fused);
            }
        else
            for (int64_t column = 0; column < dimension; column++)
                row[column] = product_sum(gradient[column], (float)-rate, row[column], fused);
        __builtin_memcpy(row + dimension, &step, sizeof step);
    }
    return 0;
}

/* Find distinct rows, copy their values to `before` unless it is null, and step them as `SGD` in rules.py does.
   If an id has no row, no row is stepped; returns how many have none. */
int64_t fleet_step_rows(const Rows *table, const int64_t *ids, int64_t num_ids, int64_t *numbers,
                        const float *gradients, float *before, int64_t dimension, double rate, double decay,
                        int32_t step) {
    return step_rows(table, ids, num_ids, numbers, gradients, before, dimension, rate, decay, step, 0);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
int64_t fleet_step_rows_fused(const Rows *table, const int64_t *ids, int64_t num_ids, int64_t *numbers,
                              const float *gradients, float *before, int64_t dimension, double rate,
                              double decay, int32_t step) {
    return step_rows(table, ids, num_ids, numbers, gradients, before, dimension, rate, decay, step, 1);
}
