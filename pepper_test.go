package edgelimit

import (
	"context"
	"fmt"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

func zapText(value any) string { return fmt.Sprint(value) }

func appOf(t *testing.T, i *instance) *App {
	t.Helper()
	app, err := i.ctx.App(appName)
	if err != nil {
		t.Fatal(err)
	}
	return app.(*App)
}

// Two instances on one storage agree on a pepper, whichever starts first; one
// that is only validated leaves none.
func TestPepperIsAgreedOn(t *testing.T) {
	storage := ownStorage(t)
	start := func() *App {
		i, err := tryInstanceOn(t, configOf(t, "http://one.local {\n\tedge_limit {\n\t\tlimit a 1/h\n\t}\n}\nhttp://two.local {\n\tedge_limit {\n\t\tlimit a 1/h\n\t}\n}"), storage)
		if err != nil {
			t.Fatal(err)
		}
		return appOf(t, i)
	}
	first, second := start(), start()
	stored := func() bool { return first.ctx.Storage().Exists(context.Background(), pepperStorageKey) }
	expect(t, stored(), false, "nothing is stored before the start")

	second.pepper = []byte("what another process made up for itself")
	for _, app := range []*App{first, second} {
		if err := app.Start(); err != nil {
			t.Fatal(err)
		}
	}
	expect(t, stored(), true, "after the start")
	expect(t, string(second.pepper), string(first.pepper), "the second takes the first one's")
	for _, template := range second.templates["a"] {
		expect(t, *template.secret.Load(), *first.templates["a"][0].secret.Load(), "and hashes keys alike, in each site that defines the limit")
	}
	expect(t, len(second.templates["a"]), 2, "sites that define it")
	third := start()
	expect(t, string(third.pepper), string(first.pepper), "who comes later reads it")
	expect(t, third.pepperStored, true, "and has nothing to store")
}

func TestPepperThatIsGiven(t *testing.T) {
	t.Setenv("EDGE_PEPPER", "0123456789abcdef")
	tests := []struct {
		why, pepper string
		ok          bool
	}{
		{"from the environment", "{env.EDGE_PEPPER}", true},
		{"a literal", "0123456789abcdef", true},
		{"too short to be a secret", "0123456789abcde", false},
		{"a variable that is not set", "{env.EDGE_NO_SUCH}", false},
		{"a file that is not there", "{file./no/such/file}", false},
	}
	for _, tt := range tests {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		_, _, err := loadPepper(ctx, tt.pepper)
		cancel()
		expect(t, err == nil, tt.ok, tt.why)
	}
}

// One client's keys in two limits must not be recognizable as one client's.
func TestSecretsDiffer(t *testing.T) {
	a, b := newKeySecret([]byte("pepper"), "a"), newKeySecret([]byte("pepper"), "b")
	if *a == *b || *a == *newKeySecret([]byte("other"), "a") {
		t.Error("two limits, or two peppers, share a secret")
	}
}
