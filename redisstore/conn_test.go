package redisstore

import (
	"math"
	"testing"
	"time"
)

// Times are told to the server in whole microseconds, never in fewer than they are.
func TestMicros(t *testing.T) {
	for _, row := range []struct {
		reason string
		d      time.Duration
		want   string
	}{
		{"nothing", 0, "0"},
		{"less than one", 1, "1"},
		{"one", time.Microsecond, "1"},
		{"a part more", time.Microsecond + 1, "2"},
		{"the most that there is: rounded up it must not become negative", math.MaxInt64, "9223372036854776"},
	} {
		t.Run(row.reason, func(t *testing.T) {
			if got := micros(row.d); got != row.want {
				t.Errorf("micros(%d ns) is %s, want %s", row.d, got, row.want)
			}
		})
	}
}
