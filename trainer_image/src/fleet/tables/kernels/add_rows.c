/* Adds rows to totals in order, so that each sum has the same bits as torch's index_add_. */

#include <stdint.h>

enum { AHEAD = 8 }; /* totals are prefetched this many rows ahead */

void fleet_add_rows(float *restrict totals, const int64_t *places, const float *restrict rows,
                    int64_t num_rows, int64_t dimension) {
    for (int64_t each = 0; each < num_rows; each++) {
        if (each + AHEAD < num_rows)
            __builtin_prefetch(totals + places[each + AHEAD] * dimension, 1);
        float *total = totals + places[each] * dimension;
        const float *row = rows + each * dimension;
        for (int64_t column = 0; column < dimension; column++)
            total[column] += row[column];
    }
}
