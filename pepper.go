package edgelimit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// The pepper is the secret that all keys are hashed with. Where none is given, a
// random one is made once and kept in Caddy's storage, so that keys stay what
// they were over a restart, and instances that share a storage agree.

const (
	minPepper        = 16 // bytes
	pepperStorageKey = "edge_limit/pepper"
	storageTimeout   = 5 * time.Second
)

// processPepper is the same over all reloads.
var processPepper = sync.OnceValue(func() []byte {
	pepper := make([]byte, 32)
	_, _ = rand.Read(pepper) // never fails, says crypto/rand
	return pepper
})

// loadPepper reads the secret: the configured one, else the stored one, else a
// random one, which storePepper keeps once the configuration has started.
func loadPepper(ctx caddy.Context, configured string) (pepper []byte, stored bool, err error) {
	if configured != "" {
		value, err := resolveSecret(configured)
		if err != nil {
			return nil, true, err
		}
		return []byte(value), true, requireLongPepper(value)
	}
	pepper, err = ctx.Storage().Load(ctx, pepperStorageKey)
	switch {
	case err == nil && len(pepper) >= minPepper:
		return pepper, true, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		ctx.Logger().Warn("the pepper cannot be read from Caddy's storage: keys are hashed with one that ends with this process",
			zap.Error(err))
	}
	return processPepper(), false, nil
}

func requireLongPepper(value string) error {
	if len(value) < minPepper {
		return fmt.Errorf("a secret of %d bytes can be guessed: give at least %d", len(value), minPepper)
	}
	return nil
}

// storePepper keeps the random pepper. If another instance was faster, its
// pepper is the one.
func (a *App) storePepper() {
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	storage := a.ctx.Storage()
	err := storage.Lock(ctx, pepperStorageKey)
	if err == nil {
		defer func() { _ = storage.Unlock(context.WithoutCancel(ctx), pepperStorageKey) }()
		var others []byte
		if others, err = storage.Load(ctx, pepperStorageKey); err == nil && len(others) >= minPepper {
			a.setPepper(others)
			return
		}
		err = storage.Store(ctx, pepperStorageKey, a.pepper)
	}
	if err != nil {
		a.logger.Warn("the pepper cannot be kept in Caddy's storage: debts will not survive a restart", zap.Error(err))
	}
}

// setPepper derives all secrets anew. Requests that came before it, in the
// moment of starting, are not remembered.
func (a *App) setPepper(pepper []byte) {
	a.pepper = pepper
	for name, templates := range a.templates {
		for _, template := range templates {
			template.secret.Store(newKeySecret(pepper, name))
		}
	}
}
