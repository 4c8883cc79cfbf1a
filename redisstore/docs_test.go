package redisstore

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// Whoever copies a Caddyfile out of the documentation gets one that works, and
// that `caddy fmt` leaves alone.
func TestDocumentedCaddyfiles(t *testing.T) {
	text, err := os.ReadFile("../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"EDGE_LIMIT_PEPPER": "0123456789abcdef", "REDIS_PASSWORD": "secret", "ADMIN": "localhost:0", "PORT": "0",
	} {
		t.Setenv(name, value)
	}
	blocks := regexp.MustCompile("(?s)```caddyfile\n(.*?)```").FindAllSubmatch(text, -1)
	if len(blocks) < 2 {
		t.Fatalf("%d Caddyfiles", len(blocks))
	}
	for _, block := range blocks {
		if formatted := caddyfile.Format(block[1]); !bytes.Equal(formatted, block[1]) {
			t.Errorf("caddy fmt would make of it:\n%s", formatted)
		}
		adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt(block[1], map[string]any{"filename": "Caddyfile"})
		if err != nil || len(warnings) > 0 {
			t.Fatalf("%v %v\n%s", err, warnings, block[1])
		}
		config := new(caddy.Config)
		if err := json.Unmarshal(adapted, config); err != nil {
			t.Fatal(err)
		}
		if err := caddy.Validate(config); err != nil {
			t.Errorf("%v\n%s", err, block[1])
		}
	}
}

// The table of subdirectives and of states is whole.
func TestDocumentedWords(t *testing.T) {
	text, err := os.ReadFile("../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("store.go")
	if err != nil {
		t.Fatal(err)
	}
	words := regexp.MustCompile(`(?m)^//\t\t([a-z_]+)`).FindAllSubmatch(source, -1)
	if len(words) < 10 {
		t.Fatalf("%d subdirectives in the comment of the parser", len(words))
	}
	for _, word := range words {
		if !regexp.MustCompile("(?m)^\\| .*`" + string(word[1]) + "[` ]").Match(text) {
			t.Errorf("no table has the subdirective %s", word[1])
		}
	}
	source, err = os.ReadFile("../store.go")
	if err != nil {
		t.Fatal(err)
	}
	kinds := regexp.MustCompile(`(?m)^\tStore\w+ += "([a-z_]+)"`).FindAllSubmatch(source, -1)
	if len(kinds) < 10 {
		t.Fatalf("%d kinds of errors", len(kinds))
	}
	for _, kind := range kinds {
		if !strings.Contains(string(text), "`"+string(kind[1])+"`") {
			t.Errorf("the state or error %s is not documented", kind[1])
		}
	}
}

// The rights that the documentation gives to a user are enough for all that a
// store is asked.
func TestDocumentedRights(t *testing.T) {
	text, err := os.ReadFile("../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^ACL SETUSER edge on >(\S+) .*$`).FindSubmatch(text)
	if line == nil {
		t.Fatal("no line gives rights to a user")
	}
	address := startRedis(t)
	admin, err := (&Store{Address: []string{address}}).dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	admin.(*conn).do(t, strings.Fields(string(line[0]))...)
	admin.(*conn).do(t, "CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru")

	connected, err := (&Store{Address: []string{address}, username: "edge", password: string(line[1])}).dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer connected.Close()
	ctx, c := context.Background(), connected.(*conn)
	askAll(t, c)
	warnings, err := c.Check(ctx)
	if err != nil {
		t.Errorf("check: %v", err)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "allkeys-lru") {
		t.Errorf("warnings: %q, want one about the policy", warnings)
	}
	for _, other := range [][]string{{"FLUSHALL"}, {"CONFIG", "GET", "*"}, {"KEYS", "*"}, {"GET", "other"}} {
		if err := c.client.Do(ctx, c.client.B().Arbitrary(other[0]).Args(other[1:]...).Build()).Error(); err == nil {
			t.Errorf("%v is allowed", other)
		}
	}
	for _, path := range []string{"clock.lua", "plain.lua", "limits.lua", "take.lua", "give_back.lua", "renew.lua", "lease.lua", "beat.lua"} {
		source, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, command := range regexp.MustCompile(`redis\.p?call\('([A-Z]+)'`).FindAllSubmatch(source, -1) {
			if !strings.Contains(string(line[0]), " +"+strings.ToLower(string(command[1]))) {
				t.Errorf("%s runs %s, which the line does not allow", path, command[1])
			}
		}
	}
}

// askAll asks a store for all that it can be asked for.
func askAll(t *testing.T, c *conn) {
	t.Helper()
	ctx := context.Background()
	charges := []edgelimit.StoreCharge{
		{Key: keyNumber(edgelimit.StoreLimit, 1), Increment: time.Second, Tolerance: time.Minute, ID: "a"},
		{Key: keyNumber(edgelimit.StoreInFlight, 1), Max: 1, TTL: time.Minute, ID: "b"},
	}
	_, beatErr := c.Beat(ctx, edgelimit.Beat{Instance: "a", TTL: time.Second, Pepper: "b"})
	takeErr, renewErr, giveBackErr := c.Take(ctx, charges), c.Renew(ctx, charges[1:]), c.GiveBack(ctx, charges)
	_, leaseErr := c.Lease(ctx, edgelimit.LeaseRequest{Key: keyNumber(edgelimit.StoreCeiling, 1), Count: 1, Want: 1, Slot: time.Second, Slots: 10})
	_, forgetErr := c.Forget(ctx, charges[0].Key)
	for what, err := range map[string]error{
		"beat": beatErr, "take": takeErr, "renew": renewErr, "give back": giveBackErr, "lease": leaseErr, "forget": forgetErr,
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The rights beyond these that a master with Sentinels and a database other than
// 0 are said to need are enough, and each is needed.
func TestDocumentedRightsBehindSentinels(t *testing.T) {
	text, err := os.ReadFile("../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^ACL SETUSER edge on >(\S+) .*$`).FindSubmatch(text)
	more := regexp.MustCompile("a master that Sentinels watch over `(\\+\\S+)`, and\\s+another `database` than 0 `(\\+\\S+)`").FindSubmatch(text)
	if line == nil || more == nil {
		t.Fatal("the documentation does not tell the rights")
	}
	master := startRedis(t)
	_, port, _ := net.SplitHostPort(master)
	config := filepath.Join(t.TempDir(), "sentinel.conf")
	if err := os.WriteFile(config, []byte("sentinel monitor watched 127.0.0.1 "+port+" 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	sentinel := startServer(t, func(args []string) []string { return append([]string{config, "--sentinel"}, args...) })
	admin, err := (&Store{Address: []string{master}}).dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	for _, row := range []struct {
		rights []string
		enough bool
	}{
		{[]string{string(more[1]), string(more[2])}, true},
		{[]string{string(more[1])}, false},
		{[]string{string(more[2])}, false},
	} {
		t.Run(strings.Join(row.rights, " "), func(t *testing.T) {
			admin.(*conn).do(t, "ACL", "DELUSER", "edge")
			admin.(*conn).do(t, append(strings.Fields(string(line[0])), row.rights...)...)
			store := &Store{Address: []string{sentinel}, MasterName: "watched", Database: 2, username: "edge", password: string(line[1])}
			connected, err := store.dial(context.Background())
			if (err == nil) != row.enough {
				t.Fatalf("connecting: %v, want that it works: %t", err, row.enough)
			}
			if err == nil {
				defer connected.Close()
				askAll(t, connected.(*conn))
			}
		})
	}
}
